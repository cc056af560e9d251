"""A web server on loopback that answers what a test says, and a system whose names lead where a test says."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, content."""


class Web:
    """A server that runs.

    Attributes:
        pages: path -> answer; a function writes to the connection itself.
        asked: "HOST PATH" of each request.
    """

    def __init__(self, port: int) -> None:
        self.port, self.host = port, f"127.0.0.1:{port}"
        self.pages: dict[str, Answer | Callable[[Any], None]] = {}
        self.asked: list[str] = []

    def url(self, path: str, host: str = "") -> str:
        return f"http://{host or '127.0.0.1'}:{self.port}{path}"


@contextmanager
def stand_in_web(context: ssl.SSLContext | None = None) -> Iterator[Web]:
    """Run a server until the block ends, with TLS if it has a context for that."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.asked.append(f"{self.headers['Host']} {self.path}")
            answer = web.pages.get(self.path.partition("?")[0], (404, {}, b""))
            if callable(answer):
                answer(self.wfile)
                return
            status, headers, content = answer
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        web = Web(server.server_address[1])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield web
        finally:
            server.shutdown()


class Names:
    """The addresses of names, and where connections went: to the stand-in, whatever their address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: dict[str, list[list[str]]] = {}  # by name: what each look-up finds
        self.connected: list[str] = []
        self._connect = socket.create_connection
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)
        monkeypatch.setattr(socket, "create_connection", self._connected)

    def _look_up(self, host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        found = self.addresses.get(host, [[host]])
        addresses = found.pop(0) if len(found) > 1 else found[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    def _connected(self, address: tuple[str, int], timeout: float) -> socket.socket:
        self.connected.append(address[0])
        connected = socket.socket()
        connected.settimeout(timeout)
        connected.connect(("127.0.0.1", address[1]))
        return connected

"""A local server that answers as the Hugging Face hub, its CDN and a package index do, with faults on demand.

Listens on 127.0.0.1 only. Large files are redirected to the name "localhost", so that a client sees another
host, as with the real hub and its CDN.
"""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from llmrun.models.download import transfer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE_BYTES = 64 * 1024


@contextmanager
def retrying(policy: transfer.RetryPolicy) -> Iterator[None]:
    """Retry what fails inside the block by this policy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "RETRY_POLICY", policy)
        yield


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Faults:
    """What goes wrong.

    Attributes:
        cut_after: for each transfer in turn, how many bytes are sent before the connection breaks.
        reset: break it with a TCP reset.
        stall_after: send so many bytes, then nothing until the server closes.
        drip: after these, one byte each hundredth of a second.
        silent: for so many transfers, accept the request and answer nothing.
        bytes_per_second: of each connection; 0 is no limit.
        ignore_range: answer 200 with everything.
        content_range: lie about the range.
        content: serve other bytes.
        encoding: claim this Content-Encoding.
        content_type, length: claim these.
        chunked: send without a length.
        etag: of the files.
        statuses: for each transfer in turn, a status in place of the file, with the headers below; 0 is none.
        resolve_statuses: the same for the hub's own answers, before the redirect.
        headers: of these answers.
        most_connections: more at the same time get 503.
        metadata: (status, X-Error-Code) of the metadata call.
        metadata_headers: of that answer, and of those that follow.
        metadata_statuses: for each metadata call in turn, a status, SILENT or HANG_UP.
        without_hash: names of files whose hash is not told.
        updated: when the repository was changed, as metadata have it.
        body: of the metadata call in place of JSON.
        commit, name, sha, size: in place of the right ones in metadata.
        circle: redirect for ever.
        same_host: redirect to the same host.
        location: redirect to here.
    """

    cut_after: list[int] = field(default_factory=list)
    reset: bool = False
    stall_after: int | None = None
    drip: bool = False
    silent: int = 0
    bytes_per_second: float = 0
    ignore_range: bool = False
    content_range: str | None = None
    content: bytes | None = None
    encoding: str | None = None
    content_type: str | None = None
    length: int | None = None
    chunked: bool = False
    etag: str | None = None
    statuses: list[int] = field(default_factory=list)
    resolve_statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    most_connections: int = 1000
    metadata: tuple[int, str] | None = None
    metadata_headers: dict[str, str] = field(default_factory=dict)
    metadata_statuses: list[int] = field(default_factory=list)
    without_hash: list[str] = field(default_factory=list)
    updated: str | None = None
    body: bytes | None = None
    commit: Any = COMMIT
    name: str | None = None
    sha: str | None = None
    size: Any = None
    circle: bool = False
    same_host: bool = False
    location: str | None = None


@dataclass(frozen=True)
class Request:
    """What a client asked for. host is the name it used, headers have lower-case names."""

    host: str
    path: str
    headers: dict[str, str]


class StandInHub:
    """One repository, one package index.

    Attributes:
        files: name -> bytes, of the repository.
        pages: path -> (content type, bytes), anything else, such as an index's pages and wheels.
        faults: to be changed at any time.
        requests: everything that was asked, in order.
        sent: bytes of files sent so far.
        busy, most_busy: transfers at this moment, and at the busiest one.
    """

    SILENT, HANG_UP = -1, -2
    """In place of a status: no answer, and none with the connection closed."""

    def __init__(self, port: int, repository: str) -> None:
        self.port = port
        self.repository = repository
        self.files: dict[str, bytes] = {}
        self.pages: dict[str, tuple[str, bytes]] = {}
        self.faults = Faults()
        self.requests: list[Request] = []
        self.sent = 0
        self.busy = 0
        self.most_busy = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def transfers(self) -> list[Request]:
        """Requests for bytes of files."""
        return [request for request in self.requests if request.path.startswith("/cdn/")]

    def metadata(self) -> bytes:
        faults = self.faults
        if faults.body is not None:
            return faults.body
        siblings = [
            {
                "rfilename": faults.name or name,
                "size": len(content) if faults.size is None else faults.size,
                "blobId": "0" * 40,
                "lfs": {"sha256": faults.sha or sha256(content), "size": len(content), "pointerSize": 134},
            }
            for name, content in self.files.items()
        ]
        for sibling in siblings:
            if sibling["rfilename"] in faults.without_hash:
                del sibling["lfs"]
        siblings.append({"rfilename": "README.md", "size": 10, "blobId": "0" * 40})  # type: ignore[dict-item]
        return json.dumps(
            {
                "id": self.repository,
                "modelId": self.repository,
                "sha": faults.commit,
                "siblings": siblings,
                "gated": False,
                "lastModified": faults.updated,
            }
        ).encode()


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        host = self.headers.get("host", "").partition(":")[0]
        path = unquote(urlsplit(self.path).path)
        names = {name.lower(): value for name, value in self.headers.items()}
        self.hub.requests.append(Request(host, path, names))
        repository = self.hub.repository
        if path.startswith(f"/api/models/{repository}"):
            self.answer_metadata()
        elif path.startswith(f"/{repository}/resolve/"):
            self.answer_resolve(path.removeprefix(f"/{repository}/resolve/").partition("/")[2])
        elif path.startswith("/cdn/"):
            self.answer_file(path.removeprefix("/cdn/"))
        elif path in self.hub.pages:
            self.answer(200, self.hub.pages[path][1], {"Content-Type": self.hub.pages[path][0]})
        else:
            self.answer(404, b"no such page", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def answer_metadata(self) -> None:
        faults = self.hub.faults
        status = faults.metadata_statuses.pop(0) if faults.metadata_statuses else 0
        if status in (StandInHub.SILENT, StandInHub.HANG_UP):
            if status == StandInHub.SILENT:
                self.hub.closing.wait(20)
            self.close_connection = True
        elif status:
            self.answer(status, b"{}", faults.metadata_headers)
        elif faults.metadata:
            status, code = faults.metadata
            self.answer(status, b"{}", {"X-Error-Code": code, **faults.metadata_headers})
        else:
            self.answer(200, self.hub.metadata(), {"Content-Type": "application/json"})

    def answer_resolve(self, name: str) -> None:
        faults = self.hub.faults
        status = faults.resolve_statuses.pop(0) if faults.resolve_statuses else 0
        if status:
            self.answer(status, b"not now", faults.headers)
            return
        host = "127.0.0.1" if faults.same_host else "localhost"
        link = f"http://{host}:{self.hub.port}/cdn/{name}"
        if faults.circle:
            link = self.path
        if faults.location is not None:
            link = faults.location
        self.answer(302, b"", {"Location": link, "X-Repo-Commit": COMMIT})

    def answer_file(self, name: str) -> None:
        hub = self.hub
        with hub.lock:
            status = hub.faults.statuses.pop(0) if hub.faults.statuses else 0
            silent, hub.faults.silent = hub.faults.silent > 0, max(hub.faults.silent - 1, 0)
            hub.busy += 1
            hub.most_busy = max(hub.busy, hub.most_busy)
            if hub.busy > hub.faults.most_connections:
                status = 503
        try:
            if silent:
                hub.closing.wait(20)
                self.close_connection = True
            elif status:
                self.answer(status, b"not now", hub.faults.headers)
            elif name not in hub.files:
                self.answer(404, b"", {})
            else:
                self.answer_range(hub.files[name] if hub.faults.content is None else hub.faults.content)
        finally:
            with hub.lock:
                hub.busy -= 1

    def answer_range(self, content: bytes) -> None:
        faults = self.hub.faults
        start, end, partial = self.asked_range(len(content))
        if start >= len(content):
            self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        with self.hub.lock:  # before the client knows anything, and can hang up and change what is next
            limit = faults.cut_after.pop(0) if faults.cut_after else len(content)
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", faults.content_range or f"bytes {start}-{end - 1}/{len(content)}")
        claims = {
            "Content-Encoding": faults.encoding,
            "Content-Type": faults.content_type,
            "ETag": faults.etag,
            "Accept-Ranges": None if faults.ignore_range else "bytes",
        }
        for name, value in claims.items():
            if value:
                self.send_header(name, value)
        if faults.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(end - start if faults.length is None else faults.length))
        self.end_headers()
        self.send_body(memoryview(content)[start:end], limit)

    def asked_range(self, size: int) -> tuple[int, int, bool]:
        """Start, end, and whether that is a part by the client's wish."""
        faults = self.hub.faults
        asked = self.headers.get("range", "")
        other_version = self.headers.get("if-range", faults.etag) != faults.etag
        if faults.ignore_range or other_version or not asked.startswith("bytes="):
            return 0, size, False
        start, _, last = asked.removeprefix("bytes=").partition("-")
        return int(start), min(int(last) + 1, size) if last else size, True

    def send_body(self, body: memoryview, limit: int) -> None:
        faults = self.hub.faults
        if faults.stall_after is not None:
            limit = faults.stall_after
        began = time.monotonic()
        done = 0
        while done < min(limit, len(body)):
            piece = body[done : min(done + PIECE_BYTES, limit)]
            self.send_piece(piece)
            done += len(piece)
            if faults.bytes_per_second:
                ahead = done / faults.bytes_per_second - (time.monotonic() - began)
                if ahead > 0 and self.hub.closing.wait(ahead):
                    break
        if faults.stall_after is not None and done < len(body):
            self.stall(body[done:])
        if done < len(body) or faults.length is not None:
            self.break_off()
        elif faults.chunked:
            self.wfile.write(b"0\r\n\r\n")

    def send_piece(self, piece: memoryview) -> None:
        with self.hub.lock:
            self.hub.sent += len(piece)
        if self.hub.faults.chunked:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        else:
            self.wfile.write(piece)

    def stall(self, rest: memoryview) -> None:
        """Fall silent, or nearly so."""
        if not self.hub.faults.drip:
            self.hub.closing.wait(20)
        for at in range(len(rest)):
            if self.hub.closing.wait(0.01):
                return
            self.send_piece(rest[at : at + 1])

    def break_off(self) -> None:
        self.close_connection = True
        if self.hub.faults.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 50

    def handle_error(self, *_: object) -> None:
        """Clients of these tests hang up all the time."""


@contextmanager
def stand_in_hub(repository: str = "maker/tiny-GGUF", tls: ssl.SSLContext | None = None) -> Iterator[StandInHub]:
    """A running server; with `tls` it talks https."""
    handler = type("Handler", (_Handler,), {})
    server = _Server(("127.0.0.1", 0), handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    handler.hub = hub = StandInHub(server.server_address[1], repository)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()

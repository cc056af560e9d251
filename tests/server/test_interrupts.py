"""Ctrl-C in a client closes its connection: the real engine computes hardly anything more.

What is computed is counted, not timed. A whole answer takes the engine minutes; what it may still compute after the
close is a small part of it.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
from support.installed import eventually
from support.random_model import write_random_model
from support.served import CHAT, SECONDS, LiveServer

pytestmark = pytest.mark.usefixtures("package_on_path")
WINDOW = 65_536  # tokens
LONG, MOST = 50_000, 12_500  # tokens of a prompt or an answer, and of what may be computed after the close
ENDLESS: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "stops_repeats": False}


def fields(path: str, text: str, n_tokens: int, *, stream: bool) -> dict[str, Any]:
    """Return a request for so many tokens."""
    message: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {**message, "max_tokens": n_tokens},
        "/v1/completions": {"prompt": text, "max_tokens": n_tokens},
        "/v1/responses": {"input": text, "max_output_tokens": n_tokens},
        "/v1/messages": {**message, "max_tokens": n_tokens},
        "/api/chat": {**message, "options": {"num_predict": n_tokens, **ENDLESS}},
        "/completion": {"prompt": text, "n_predict": n_tokens},
    }
    return {**bodies[path], "stream": stream, **ENDLESS}


PATHS = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/completion")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("interrupts")
    model = write_random_model(folder / "random.gguf", n_ctx=WINDOW)
    with LiveServer(folder, ("real",), model=model, n_ctx=WINDOW, speculate=0) as live:
        yield live.once_loaded()


@contextmanager
def relayed(port: int) -> Iterator[int]:
    """Yield the port of a proxy that passes bytes on, and closes one side when the other is closed."""

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with source, target:
            with suppress(OSError):
                while data := source.recv(65_536):
                    target.sendall(data)
            with suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)  # close() alone waits for the other thread's recv()

    def accept(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        onward = socket.create_connection(("127.0.0.1", port))
        for pair in ((connection, onward), (onward, connection)):
            threading.Thread(target=pass_on, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, args=(listening,), daemon=True).start()
        yield listening.getsockname()[1]


def interrupt(
    server: LiveServer, path: str, phase: str, *, stream: bool, before: bytes = b"", after: bytes = b"", port: int = 0
) -> None:
    """Close a connection in mid-prefill or mid-answer, and check what is computed after it.

    Args:
        before: a request on the same connection that is answered before.
        after: bytes that follow the request.
        port: of a proxy.
    """
    text, n_tokens = (f"{path}{stream}" + "a " * (LONG // 2), 16) if phase == "prefill" else ("Hi", LONG)
    body = json.dumps(fields(path, text, n_tokens, stream=stream)).encode()
    index, n_running = ("prefill", "decode").index(phase), server.running
    with closing(socket.create_connection(("127.0.0.1", port or server.port), SECONDS)) as connection:
        if before:
            connection.sendall(before)
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
            assert eventually(lambda: server.running == n_running, SECONDS)
        n_before = server.computed[index]
        connection.sendall(server.request("POST", path, body, connection="keep-alive"))
        assert eventually(lambda: server.running > n_running and server.computed[index] > n_before, SECONDS)
        connection.sendall(after)
    n_closed = server.computed[index]
    assert eventually(lambda: server.running == n_running, SECONDS)
    assert server.computed[index] - n_closed <= MOST


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_closed_connection_ends_the_work(server: LiveServer, path: str, stream: bool, phase: str) -> None:
    interrupt(server, path, phase, stream=stream)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_had_another_request(server: LiveServer, stream: bool, phase: str) -> None:
    first = server.request("GET", "/v1/models", connection="keep-alive")
    interrupt(server, "/v1/messages", phase, stream=stream, before=first)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_with_bytes_of_a_next_request(server: LiveServer, stream: bool, phase: str) -> None:
    """Some clients end a body with an empty line, and some send the next request ahead."""
    interrupt(server, CHAT, phase, stream=stream, after=b"\r\n")
    interrupt(server, CHAT, phase, stream=stream, after=server.request("GET", "/health", connection="keep-alive"))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_behind_a_proxy(server: LiveServer, stream: bool, phase: str) -> None:
    with relayed(server.port) as port:
        interrupt(server, "/v1/responses", phase, stream=stream, port=port)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_beside_another_answer(server: LiveServer, phase: str) -> None:
    """The batch that both share ends before."""
    with closing(server.connect()) as other:
        body = json.dumps(fields(CHAT, "Ho", LONG, stream=True)).encode()
        other.sendall(server.request("POST", CHAT, body))
        assert other.recv(65_536)
        assert eventually(lambda: server.running == 1, SECONDS)
        interrupt(server, "/v1/messages", phase, stream=True)
    assert eventually(lambda: server.running == 0, SECONDS)

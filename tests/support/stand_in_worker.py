"""A worker that answers ggml's RPC questions from memory, or misbehaves."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from llmrun.runner.workers import VERSION

GB = 10**9
DEVICES = ((20 * GB, 24 * GB), (8 * GB, 8 * GB))
"""Free and total memory of each."""

_MEMORY, _HELLO, _COUNT = 11, 14, 15

Serve = Callable[[socket.socket], None]


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _answer(connection: socket.socket, data: bytes) -> None:
    connection.sendall(struct.pack("<Q", len(data)) + data)


def good(version: tuple[int, int, int] = VERSION, devices: tuple[tuple[int, int], ...] = DEVICES) -> Serve:
    """Answers everything."""

    def serve(connection: socket.socket) -> None:
        while True:
            command = _read(connection, 1)[0]
            request = _read(connection, struct.unpack("<Q", _read(connection, 8))[0])
            if command == _HELLO:
                _answer(connection, bytes(version) + bytes(25))
            elif command == _COUNT:
                _answer(connection, struct.pack("<I", len(devices)))
            elif command == _MEMORY:
                _answer(connection, struct.pack("<2Q", *devices[struct.unpack("<I", request)[0]]))

    return serve


def silent(connection: socket.socket) -> None:
    """Listens, and says nothing."""
    with suppress(EOFError):
        while True:
            _read(connection, 1)


def closing(connection: socket.socket) -> None:
    """Hangs up at once."""


def garbage(connection: socket.socket) -> None:
    """A web server."""
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def too_many_devices(connection: socket.socket) -> None:
    """Thousands of devices."""
    good(devices=((1, 1),) * 5000)(connection)


@contextmanager
def worker(serve: Serve) -> Iterator[str]:
    """Its endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, suppress(EOFError, OSError):
                        serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()

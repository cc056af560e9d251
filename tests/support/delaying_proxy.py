"""A TCP proxy that hands everything on some time later: a far machine on this one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue


def _hand_on(source: socket.socket, target: socket.socket, delay: float) -> None:
    """One direction, until the source ends: nothing waits for what came before it."""
    waiting: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def send() -> None:
        with suppress(OSError):
            while True:
                due, data = waiting.get()
                time.sleep(max(due - time.monotonic(), 0))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)

    threading.Thread(target=send, daemon=True).start()
    data = b"first"
    while data:
        try:
            data = source.recv(1 << 18)
        except OSError:
            data = b""
        waiting.put((time.monotonic() + delay, data))


@contextmanager
def delayed(endpoint: str, delay: float) -> Iterator[str]:
    """An endpoint whose bytes reach the other one so many seconds later, and its answers too."""
    host, _, port = endpoint.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    here, _ = listening.accept()
                    there = socket.create_connection((host, int(port)))
                    for each in (here, there):
                        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    for pair in ((here, there), (there, here)):
                        threading.Thread(target=_hand_on, args=(*pair, delay), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)

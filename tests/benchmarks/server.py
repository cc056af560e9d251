"""Servers to measure: start, wait until they are ready, stop.

Not a benchmark itself.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_START_SECONDS = 120


@contextmanager
def running(command: Sequence[str]) -> Iterator[int]:
    """Yield the port of a server that takes --port and answers /health when it is ready."""
    with process(command) as (port, _):
        yield port


@contextmanager
def process(command: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the port and the process id of such a server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen([*command, "--port", str(port)], **quiet)
    try:
        _wait_for(port)
        yield port, started.pid
    finally:
        started.terminate()
        started.wait()


def _wait_for(port: int) -> None:
    for _ in range(10 * _START_SECONDS):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server does not start")

"""Real workers on this machine, for a llama.cpp that has RPC."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

LLMRUN = shutil.which("llmrun", path=str(Path(sys.executable).parent)) or "llmrun"


def free_port() -> int:
    """One that nobody uses just now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class RealWorker:
    """`llmrun worker`, which can be reached. Close it in the end.

    Attributes:
        endpoint: "127.0.0.1:PORT".
    """

    def __init__(self, port: int = 0, threads: int = 0) -> None:
        port = port or free_port()
        self.endpoint = f"127.0.0.1:{port}"
        words = [LLMRUN, "worker", "--port", str(port), *(["--threads", str(threads)] if threads else [])]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        first = self.process.stderr.readline()
        assert "served at" in first, first

    def kill(self) -> None:
        """What computes dies at once, as of a power cut."""
        for child in psutil.Process(self.process.pid).children():
            child.kill()
        self.process.wait()

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.communicate()


@contextmanager
def real_workers(count: int, threads: int = 0) -> Iterator[list[RealWorker]]:
    """So many workers, ended afterwards."""
    found: list[RealWorker] = []
    try:
        for _ in range(count):
            found.append(RealWorker(threads=threads))
        yield found
    finally:
        for each in found:
            each.close()

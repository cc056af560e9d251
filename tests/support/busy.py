"""Processes that compute at normal priority beside the tests, as a compiler or a video call does.

Run as `python tests/support/busy.py`; it ends with its parent, however that ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep this many processes busy until the block ends, or this process does."""
    processes = [subprocess.Popen((sys.executable, __file__, str(os.getpid()))) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def burn(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(100_000))  # a few milliseconds


if __name__ == "__main__":
    burn(int(sys.argv[1]))

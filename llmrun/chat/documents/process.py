"""The process that reads documents, as the front sees it: kept for the next one, since its start takes longer than most
documents do. Must not know what is read.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from contextlib import suppress

_ROOT = os.path.abspath(os.sep)  # noqa: PTH100 - nothing in the user's folder may shadow a module
_COMMAND = (sys.executable, "-c", "from llmrun.chat.documents.reader import main; main()")
_kept: list[subprocess.Popen[bytes]] = []  # at most one, which is idle


def read_elsewhere(kind: str, data: bytes, seconds: int) -> tuple[int, bytes]:
    """Let another process read a document; return the exit status of what read it, and its answer.

    Args:
        seconds: limit of time that passes on Windows, where a process reads one document only.

    Raises:
        TimeoutExpired: it took longer.
    """
    request = b"%s %d\n%s" % (kind.encode(), len(data), data)
    if sys.platform == "win32":
        process = _start()
        try:
            return _parsed(process.communicate(request, seconds)[0])
        finally:
            _end(process)
    while (process := _take()) is not None:
        with suppress(OSError, ValueError):  # it has just ended, because it was idle
            return _ask(process, request)
    return _ask(_start(), request)


def end_kept() -> None:
    """End the process that waits for a document."""
    while (process := _take()) is not None:
        _end(process)


atexit.register(end_kept)


def _start() -> subprocess.Popen[bytes]:
    """Start a process in a group of its own: Ctrl-C is for the front."""
    pipe = subprocess.PIPE
    is_group = sys.platform != "win32"
    return subprocess.Popen(
        _COMMAND, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd=_ROOT, start_new_session=is_group
    )


def _take() -> subprocess.Popen[bytes] | None:
    with suppress(IndexError):  # another thread has it
        return _kept.pop()
    return None


def _ask(process: subprocess.Popen[bytes], request: bytes) -> tuple[int, bytes]:
    """Return the answer of a process, and keep it. Raises OSError or ValueError if it has ended."""
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request)
        process.stdin.flush()
        status, n_bytes = process.stdout.readline().split()
        answer = int(status), process.stdout.read(int(n_bytes))
    except BaseException:
        _end(process)
        raise
    if _kept:
        _end(process)
    else:
        _kept.append(process)
    return answer


def _parsed(answer: bytes) -> tuple[int, bytes]:
    head, _, text = answer.partition(b"\n")
    status, _ = head.split()
    return int(status), text


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what reads a document for it."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what was not written yet
            if pipe is not None:
                pipe.close()
    process.wait()

"""Which servers run on this machine: a small file for each, locked as long as its server lives.

Owns the files; must not know HTTP. The system drops a lock when its process ends, however that happens: no process id
is ever believed without it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from llmrun.protocol.codec import load_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

END_NOW = getattr(signal, "SIGUSR1", signal.SIGTERM)
"""Ends a server without waiting for its answers. SIGTERM always waits; Windows has nothing else."""
_FOLDER = "servers"
_MOST_BYTES = 64 * 1024
_CLAIMS, _CLAIM_SECONDS = 100, 0.01  # readers hold a lock for less than a millisecond


class RunningServer(NamedTuple):
    """A server of this user.

    Attributes:
        pid: of its process.
        address: "http://127.0.0.1:8080".
        port: of it.
        since: when it was started, Unix time.
        models: names of those in memory.
        grace_seconds: how long running answers may go on when it is asked to end; None is for ever.
        is_ending: it was asked to end, and waits for running answers.
    """

    pid: int
    address: str
    port: int
    since: float
    models: tuple[str, ...] = ()
    grace_seconds: float | None = None
    is_ending: bool = False

    def stop(self, *, now: bool = False) -> None:
        """Ask it to end when running answers are finished, or now; more than once is the same as once."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, END_NOW if now else signal.SIGTERM)


class ServerFile:
    """The file of a server that runs in this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, server: RunningServer) -> None:
        """Say how it is."""
        data = json.dumps(server._asdict()).encode()
        with suppress(OSError):  # nobody but `llmrun ps` misses it
            os.pwrite(self._descriptor, data, 0)
            os.ftruncate(self._descriptor, len(data))


@contextmanager
def registered(state_dir: Path, address: str) -> Iterator[ServerFile | None]:
    """A server listens at this address until the block ends; None where that can't be written down."""
    path = state_dir / _FOLDER / f"{quote(address, safe='')}.json"
    descriptor = -1
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = _claim(path)
    if descriptor < 0:
        yield None
        return
    try:
        yield ServerFile(descriptor)
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _claim(path: Path) -> int:
    """Create a server's file and lock it, while others may look at it, or remove what a dead server left there.

    Raises:
        OSError: it can't be written, or another server holds the lock.
    """
    for _ in range(_CLAIMS):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(FileNotFoundError):
            if _lock(descriptor, exclusive=True) and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)
        time.sleep(_CLAIM_SECONDS)
    raise OSError(f"{path} is locked")


def running_servers(state_dir: Path) -> list[RunningServer]:
    """Those that live, by port."""
    found = [server for path in (state_dir / _FOLDER).glob("*.json") if (server := _read(path)) is not None]
    return sorted(found, key=lambda server: server.port)


def _read(path: Path) -> RunningServer | None:
    """What a file says; one whose server is dead is removed."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if fcntl is not None and _lock(descriptor, exclusive=False):
            path.unlink(missing_ok=True)
            return None
        facts: dict[str, Any] = load_json(os.read(descriptor, _MOST_BYTES))
        return RunningServer(**{**facts, "models": tuple(facts["models"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None  # it is just being written
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, exclusive: bool) -> bool:
    """Lock a file; return whether that is possible now. Any number of readers may look at the same time."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

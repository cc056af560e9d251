"""The disk's side of a download: room, locks, and what to do when a disk is full.

Owns the words that fit models; must not know the network nor what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from llmrun import storage


def require_space(folder: Path, needed: int) -> None:
    """Raises DiskFullError unless the folder's disk has so many free bytes."""
    storage.require_room(folder, needed, "free some space, or move the models with HF_HOME")


def disk_errors(path: Path, needed: Callable[[], int] = lambda: 0) -> AbstractContextManager[None]:
    """See storage.disk_errors(), for what can be gone on with."""
    return storage.disk_errors(path, needed, hint=f"{storage.MAKE_ROOM}; what has arrived is kept")


@contextmanager
def exclusive(lock: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file; wait for whoever has it. The lock of a dead process counts for nothing.

    Args:
        on_wait: called once when somebody else has it.
    """
    from filelock import FileLock, Timeout

    lock.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        on_wait()
        held.acquire()
    try:
        yield
    finally:
        held.release()

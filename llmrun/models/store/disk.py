"""Free space, locks and disk errors of downloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from llmrun import storage


def require_space(folder: Path, needed: int) -> None:
    """Raise DiskFullError unless the folder's disk has `needed` bytes free."""
    storage.require_room(folder, needed, "free some space, or move the models with HF_HOME")


def disk_errors(path: Path, needed: Callable[[], int] = lambda: 0) -> AbstractContextManager[None]:
    """Translate disk errors of a resumable transfer; see storage.disk_errors()."""
    return storage.disk_errors(path, needed, hint=f"{storage.MAKE_ROOM}; what has arrived is kept")


@contextmanager
def exclusive(lock: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file, waiting for another holder. The lock of a dead process does not count.

    Args:
        on_wait: called once when another process holds the lock.
    """
    from filelock import FileLock, Timeout

    lock.parent.mkdir(parents=True, exist_ok=True)
    file_lock = FileLock(lock)
    try:
        file_lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        file_lock.acquire()
    try:
        yield
    finally:
        file_lock.release()

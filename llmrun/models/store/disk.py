"""The disk's side of a download: room, locks, errors in our words, renames that survive a power cut.

Owns what is said when a disk is full; must not know the network nor what is written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmrun.errors import DiskFullError, ResourceError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MAKE_ROOM = "free some space and run the same command again; what has arrived is kept"


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that a folder is on, or will be on."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    import shutil  # 3 ms: it brings every kind of compression

    return shutil.disk_usage(folder).free


def require_space(folder: Path, needed: int) -> None:
    """Raises DiskFullError unless the folder's disk has so many free bytes."""
    free = free_bytes(folder)
    if needed > free:
        raise DiskFullError(
            f"the disk of {str(folder)!r} is too full",
            why=f"{needed:,} bytes are needed, {free:,} are free",
            hint="free some space, or move the models with HF_HOME",
        )


@contextmanager
def disk_errors(path: Path, needed: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn what the file system says while `path` is written into our errors.

    Args:
        needed: how many more bytes would have been written, 0 when nobody knows.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(
                f"no space is left on the disk for {str(path)!r}", why=_room(path, needed()), hint=_MAKE_ROOM
            ) from error
        if error.errno == errno.EFBIG:
            raise DiskFullError(
                f"a file as large as {str(path)!r} is not allowed there",
                why=f"{_room(path, needed())}, but `ulimit -f` or the file system (FAT32: 4 GB) has a limit of its own",
                hint="raise `ulimit -f`, or move the models to another disk with HF_HOME",
            ) from error
        raise ResourceError(f"can't write {str(path)!r}", why=error.strerror or str(error)) from error


def _room(path: Path, needed: int) -> str:
    free = f"{free_bytes(path.parent):,}"
    return f"{needed:,} more bytes are needed, {free} are free" if needed > 0 else f"{free} bytes are free"


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


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    if os.name == "nt":  # folders can't be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Who has a model loaded: a shared lock on the file itself, so that nobody removes it meanwhile.

The system drops the lock when its process ends, however that happens. Where files can't be locked (Windows, some
network disks) nothing is known; Windows itself refuses to remove a file that is mapped.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.gguf import filenames


@contextmanager
def using(path: Path) -> Iterator[None]:
    """Say that a model is loaded, until the block ends. Of a split model, `path` is the first part.

    Raises:
        ModelNotFoundError: it is being removed right now.
    """
    parts = [path.with_name(name) for name in filenames.all_parts(path.name)]
    held: list[int] = []
    try:
        for part in parts:
            descriptor = _open(part)
            if descriptor is not None:
                held.append(descriptor)
                if not _lock(descriptor, exclusive=False):
                    raise ModelNotFoundError(f"{str(path)!r} is being removed", why="another llmrun is at it")
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


@contextmanager
def removing(paths: Iterable[Path], name: str) -> Iterator[None]:
    """Keep everybody from loading these files until the block ends.

    Raises:
        UsageError: one is in use.
    """
    held: list[int] = []
    seen: set[tuple[int, int]] = set()  # a file may be named twice, but can't be locked twice
    try:
        for path in paths:
            descriptor = _open(path)
            if descriptor is not None:
                held.append(descriptor)
                fact = os.fstat(descriptor)
                if (fact.st_dev, fact.st_ino) in seen:
                    continue
                seen.add((fact.st_dev, fact.st_ino))
                if not _lock(descriptor, exclusive=True):
                    raise UsageError(
                        f"{name} is in use", why="an llmrun process has it loaded", hint="end that one first"
                    )
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def in_use(path: Path) -> bool:
    """Whether somebody has this file loaded."""
    try:
        with removing([path], path.name):
            return False
    except UsageError:
        return True


class Holder(NamedTuple):
    """A process that has a file open, and its command line."""

    pid: int
    command: str


def holders(paths: Iterable[Path]) -> list[Holder]:
    """Return this user's processes that have one of the files open, without those that one of them started.

    Empty where the system does not tell.
    """
    import psutil  # type: ignore[import-untyped,unused-ignore]

    meant = {(fact.st_dev, fact.st_ino) for path in paths if (fact := _fact(path)) is not None}
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            opened = (_fact(Path(file.path)) for file in process.open_files())
            if any(fact is not None and (fact.st_dev, fact.st_ino) in meant for fact in opened):
                found[process.pid] = process
    firsts = [process for process in found.values() if process.ppid() not in found]
    return [Holder(process.pid, shlex.join(process.cmdline())) for process in firsts if process.pid != os.getpid()]


def _fact(path: Path) -> os.stat_result | None:
    with suppress(OSError):
        return path.stat()
    return None


def _open(path: Path) -> int | None:
    # Without blocking: a path may be a pipe by now.
    with suppress(OSError):
        return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    return None


def _lock(descriptor: int, *, exclusive: bool) -> bool:
    """Whether the file is locked now; also True where it can't be."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this disk has no locks
        return True
    return True

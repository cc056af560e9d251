"""The use of a model: shared locks on loaded files, so that nothing removes them meanwhile, and the time of last use.

The system drops a lock when its process ends, even after a crash. Files that can't be locked (Windows, some network
disks) count as unused; Windows itself refuses to remove a mapped file. Disks do not keep access times reliably: the
time of use is that of an empty file for each model in the state folder, which needs no lock.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from llmrun.config import load_settings
from llmrun.errors import LlmrunError, ModelNotFoundError, UsageError
from llmrun.gguf import filenames
from llmrun.system import lock

_FOLDER = "used"


def note_use(model: Path) -> None:
    """Keep the time now for a model, if the disk allows it. Of a split model, `model` is the first part."""
    with suppress(OSError, LlmrunError):
        mark = _mark(model)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def last_used(model: Path) -> float:
    """Return the time of a model's last use, in seconds since 1970; 0 if llmrun has not used it."""
    with suppress(OSError, LlmrunError):
        return _mark(model).stat().st_mtime
    return 0.0


def forget_use(model: Path) -> None:
    """Forget a model that is removed. Call it while its file still exists, which may be a link to another."""
    with suppress(OSError, LlmrunError):
        os.remove(_mark(model))  # noqa: PTH107 - as removal.py counts on Path.unlink() for models


def _mark(model: Path) -> Path:
    from hashlib import sha256

    name = sha256(os.fsencode(os.path.realpath(model))).hexdigest()[:32]
    return load_settings().state_dir / _FOLDER / name


@contextmanager
def using(path: Path) -> Iterator[None]:
    """Hold a shared lock on a model until the block ends, and keep the time of use.

    Of a split model, `path` is the first part.

    Raises ModelNotFoundError if it is being removed.
    """
    with ExitStack() as files:
        for name in filenames.all_parts(path.name):
            descriptor = _open(path.with_name(name), files)
            if descriptor is not None and lock(descriptor, shared=True) is False:
                raise ModelNotFoundError(f"{str(path)!r} is being removed", why="by another llmrun process")
        note_use(path)
        try:
            yield
        finally:
            note_use(path)


@contextmanager
def removing(paths: Iterable[Path], name: str) -> Iterator[None]:
    """Prevent other processes from loading these files until the block ends. Raises UsageError if one is in use."""
    seen: set[tuple[int, int]] = set()  # a file may be named twice, but can't be locked twice
    with ExitStack() as files:
        for path in paths:
            descriptor = _open(path, files)
            if descriptor is None or (identity := _identity(os.fstat(descriptor))) in seen:
                continue
            seen.add(identity)
            if lock(descriptor) is False:
                why = "an llmrun process has it loaded"
                raise UsageError(f"{name} is in use", why=why, hint="end that process first")
        yield


def in_use(path: Path) -> bool:
    try:
        with removing([path], path.name):
            return False
    except UsageError:
        return True


def holders(paths: Iterable[Path]) -> dict[int, str]:
    """Return the command lines of this user's processes that have one of the files open, without their children.

    Empty where the system does not tell.
    """
    import psutil  # type: ignore[import-untyped,unused-ignore]

    wanted = _identities(paths)
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if wanted & _identities(Path(file.path) for file in process.open_files()):
                processes[process.pid] = process
    parents = [process for process in processes.values() if process.ppid() not in processes]
    return {process.pid: shlex.join(process.cmdline()) for process in parents if process.pid != os.getpid()}


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _identities(paths: Iterable[Path]) -> set[tuple[int, int]]:
    identities = set()
    for path in paths:
        with suppress(OSError):
            identities.add(_identity(path.stat()))
    return identities


def _open(path: Path, files: ExitStack) -> int | None:
    """Open a file until the stack is closed; None if it can't be opened."""
    with suppress(OSError):
        # Non-blocking: the path may have become a pipe.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        files.callback(os.close, descriptor)
        return descriptor
    return None

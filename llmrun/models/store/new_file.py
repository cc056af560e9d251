"""Files that arrive: the temporary file beside a target, free space, locks, and leftovers of killed processes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from llmrun import storage
from llmrun.errors import UsageError
from llmrun.gguf.filenames import all_parts
from llmrun.system import lock

# Two in a row where one makes a temporary file for the other.
_LEFTOVER = re.compile(r"\.+.+\.gguf(?:\.(\d+)\.tmp)+")


def temporary(target: Path, kind: str = "") -> Path:
    """Return the path of this process's temporary file beside a target.

    Args:
        kind: distinguishes several temporary files of one target.
    """
    name = target.name.removesuffix(".gguf") + (f".{kind}" if kind else "")
    return target.with_name(f".{name}.gguf.{os.getpid()}.tmp")


def arriving(target: Path, n_bytes: int = 0) -> AbstractContextManager[Path]:
    """Yield a temporary file that is renamed to the target when the block succeeds; see storage.arriving().

    Args:
        n_bytes: expected size, for the message about a full disk; 0 when unknown.
    """
    return storage.arriving(target, temporary(target), needed=lambda: n_bytes, hint=_other_disk(target))


def probe(path: Path) -> None:
    """Append some bytes to a file after a failed write, to raise the system's reason as an OSError."""
    with path.open("ab") as file:
        file.write(b"\0" * 65536)
        file.flush()
        os.fsync(file.fileno())


def require_room(target: Path, n_bytes: int) -> None:
    """Raise DiskFullError unless the target's disk has `n_bytes` free."""
    storage.require_room(target.parent, n_bytes, _other_disk(target))


def _other_disk(target: Path) -> str:
    return f"free some space, or name another folder than {str(target.parent)!r} in OUT"


def refuse_inputs(target: Path, inputs: Iterable[Path]) -> None:
    """Raise if an output would overwrite an input, by whatever name: path, symbolic link, hard link.

    Args:
        inputs: files; of a split model the first stands for all.

    Raises:
        UsageError: the target is one of them.
    """
    for path in inputs:
        for part in (path.with_name(name) for name in all_parts(path.name)):
            if _is_same(part, target):
                raise UsageError(
                    f"{str(target)!r} would be overwritten while it is read",
                    why="" if part == target else f"it is the same file as {str(part)!r}",
                    hint="name another file as OUT",
                )


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:  # one of them is not there
        return False


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that were killed."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            match = _LEFTOVER.fullmatch(entry.name)
            path = Path(entry.path)
            if match and entry.is_file(follow_symlinks=False) and _is_dead(int(match[1]), path):
                with suppress(OSError):
                    path.unlink()


def _is_dead(pid: int, path: Path) -> bool:
    """Return whether a temporary file's writer has ended.

    The process must be gone, and the file must be unlocked: a pid of another container means nothing here.
    """
    if sys.platform == "win32":  # which does not remove a file in use
        return True
    try:
        os.kill(pid, 0)
        return False
    except PermissionError:
        return False
    except (ProcessLookupError, OverflowError):
        pass
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return lock(descriptor) is True
    finally:
        os.close(descriptor)


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
    lock.parent.mkdir(parents=True, exist_ok=True)
    file_lock = FileLock(lock)
    try:
        held = file_lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        held = file_lock.acquire()
    with held:
        yield

"""Where a new model file is written so that it is there whole or not at all, whatever happens meanwhile.

Owns the temporary file beside the target, its end, and what is left of the dead; must not know what is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from llmrun import storage
from llmrun.errors import UsageError
from llmrun.gguf.filenames import all_parts

try:
    import fcntl
except ImportError:  # Windows, where nobody can remove a file that is open
    fcntl = None  # type: ignore[assignment]

# Two in a row where one makes a temporary file for the other.
_LEFTOVER = re.compile(r"\.+.+\.gguf(?:\.(\d+)\.tmp)+")


def temporary(target: Path, kind: str = "") -> Path:
    """The name of a temporary file of this process beside a file.

    Args:
        kind: what tells it from others of the same target.
    """
    name = target.name.removesuffix(".gguf") + (f".{kind}" if kind else "")
    return target.with_name(f".{name}.gguf.{os.getpid()}.tmp")


def arriving(target: Path, n_bytes: int = 0) -> AbstractContextManager[Path]:
    """A temporary file that gets the target's name when the block ends well, see storage.arriving().

    Args:
        n_bytes: that the file will have, to be told when there is no room; 0 when nobody knows.
    """
    return storage.arriving(target, temporary(target), needed=lambda: n_bytes, hint=_other_disk(target))


def probe(path: Path) -> None:
    """Append a little to a file that could not be written on: the system says again why not, as an OSError."""
    with path.open("ab") as file:
        file.write(b"\0" * 65536)
        file.flush()
        os.fsync(file.fileno())


def require_room(target: Path, n_bytes: int) -> None:
    """Raises DiskFullError unless the target's disk has so many free bytes beside what is there now."""
    storage.require_room(target.parent, n_bytes, _other_disk(target))


def _other_disk(target: Path) -> str:
    return f"free some space, or name another place than {str(target.parent)!r} as OUT"


def refuse_inputs(target: Path, inputs: Iterable[Path]) -> None:
    """See that no input is overwritten, by whatever name: path, symbolic link, hard link.

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
    for path in _leftovers(folder):
        with suppress(OSError):
            path.unlink()


def _leftovers(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        for entry in os.scandir(folder):
            found = _LEFTOVER.fullmatch(entry.name)
            if found and entry.is_file(follow_symlinks=False) and _is_dead(int(found[1]), Path(entry.path)):
                yield Path(entry.path)


def _is_dead(pid: int, path: Path) -> bool:
    """Whether nobody writes a temporary file any more.

    The process must be gone; and nobody must hold the file, for in another container its number tells nothing.
    """
    if fcntl is None:
        return True  # if not, it can't be removed
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
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)

"""Folder for the files of a report: one named by the user, or a temporary one.

Owns the check of disk space, and the cleanup after killed processes; must not know the files' content.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmrun.errors import DiskFullError
from llmrun.storage import disk_errors, free_bytes

_SPARE = 1.02  # overhead of the file system
_PREFIX, _LOCK = ".llmrun-report-", ".lock"


@contextmanager
def working_folder(keep: Path | None, n_bytes: int) -> Iterator[Path]:
    """Yield a folder with room for `n_bytes`.

    Args:
        keep: the folder, which stays; None for a temporary one in the current directory, or else in the system's
            folder for temporary files.

    Raises:
        DiskFullError: there is no room.
        ResourceError: the folder can't be created.
    """
    from filelock import FileLock

    needed = int(n_bytes * _SPARE)
    if keep is not None:
        _require_room([keep], needed)
        with disk_errors(keep):
            keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    parents = [parent for parent in (Path.cwd(), Path(tempfile.gettempdir())) if os.access(parent, os.W_OK)]
    for parent in parents:
        _remove_leftovers(parent)
    parent = _require_room(parents, needed)
    with disk_errors(parent / _PREFIX):
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        with FileLock(folder / _LOCK):  # ends with the process, see _remove_leftovers()
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_room(folders: list[Path], needed: int) -> Path:
    for folder in folders:
        if free_bytes(folder) >= needed:
            return folder
    free = ", ".join(f"{free_bytes(folder):,} in {str(folder)!r}" for folder in folders) or "no folder is writable"
    raise DiskFullError(
        "the disk is too full for the files of all types",
        why=f"{needed:,} bytes are needed, free are: {free}",
        hint="fewer --types, or --keep FOLDER on another disk",
    )


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of killed processes; those of other users stay."""
    from filelock import FileLock, Timeout

    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            with FileLock(folder / _LOCK, timeout=0):
                pass
        except (Timeout, OSError):
            continue
        shutil.rmtree(folder, ignore_errors=True)

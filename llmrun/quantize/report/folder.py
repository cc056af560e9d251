"""Where the files of a report are while it lasts: in a folder that stays, or in one that is gone afterwards.

Owns room on the disk and what the killed left behind; must not know what is in the files.
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

_SPARE = 1.02  # file systems need some room for themselves
_PREFIX, _LOCK = ".llmrun-report-", ".lock"


@contextmanager
def working_folder(keep: Path | None, n_bytes: int) -> Iterator[Path]:
    """A folder with room for so many bytes.

    Args:
        keep: the folder itself, which stays; None is a new one here, or else where temporary files go, which is removed
            when the block ends.

    Raises:
        DiskFullError: there is no room.
        ResourceError: it can't be made.
    """
    needed = int(n_bytes * _SPARE)
    if keep is not None:
        _require_room([keep], needed)
        with disk_errors(keep):
            keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    places = [place for place in (Path.cwd(), Path(tempfile.gettempdir())) if os.access(place, os.W_OK)]
    for place in places:
        _remove_leftovers(place)
    place = _require_room(places, needed)
    with disk_errors(place / _PREFIX):
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    try:
        with _held(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_room(places: list[Path], needed: int) -> Path:
    for place in places:
        if free_bytes(place) >= needed:
            return place
    free = ", ".join(f"{free_bytes(place):,} in {str(place)!r}" for place in places) or "nothing can be written here"
    raise DiskFullError(
        "the disk is too full for the files of all types",
        why=f"{needed:,} bytes are needed, free are: {free}",
        hint="fewer --types, or --keep FOLDER on another disk",
    )


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder is in use as long as this process lives, and the block lasts."""
    from filelock import FileLock

    with FileLock(folder / _LOCK):
        yield


def _remove_leftovers(place: Path) -> None:
    """Folders of reports whose process was killed; those of other users stay."""
    from filelock import FileLock, Timeout

    for folder in place.glob(f"{_PREFIX}*"):
        try:
            with FileLock(folder / _LOCK, timeout=0):
                pass
        except (Timeout, OSError):
            continue
        shutil.rmtree(folder, ignore_errors=True)

"""Removal of a model from the cache.

Owns the decision about shared files and the order; must not ask the user. Names go before bytes, so that an
interruption leaves no broken name; collect.py finds bytes without a name.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import UsageError
from llmrun.gguf import filenames
from llmrun.models.store.in_use import removing
from llmrun.models.store.installed import LINK, LM_STUDIO, OLLAMA, Installed
from llmrun.models.store.last_used import forget_use
from llmrun.models.store.store import SnapshotFile, Store, symlink_target
from llmrun.storage import disk_errors
from llmrun.system import read_text


@dataclass(frozen=True, slots=True)
class Removal:
    """Effects of removing a model."""

    model: Installed
    folder: Path  # of its repository, or of its plain link
    names: tuple[Path, ...]  # snapshot files to remove
    blobs: tuple[Path, ...]  # blobs to remove
    freed: int  # bytes on disk
    shared: tuple[str, ...]  # other users of its bytes, which therefore stay; untrusted text


def plan_removal(store: Store, model: Installed) -> Removal:
    """Compute the effects of removing a model; change nothing. Raises UsageError if it belongs to another program."""
    if model.place == OLLAMA:
        name = model.name.removeprefix("ollama/")
        raise UsageError(f"{model.name} belongs to Ollama", why="llmrun only reads it", hint=f"ollama rm {name}")
    if model.place == LM_STUDIO:
        raise UsageError(
            f"{model.name} belongs to LM Studio", why="llmrun only reads it", hint="delete it in LM Studio's My Models"
        )
    if model.place == LINK:
        folder = model.path.parent
        return Removal(model, folder, (), (model.path,), disk_bytes([model.path]), ())
    folder = model.path.parents[len(Path(model.filename).parts) + 1]
    parts = set(filenames.all_parts(model.filename))
    files = store.snapshot_files(folder)
    going = [file for file in files if file.name in parts]
    staying = [file for file in files if file.name not in parts]
    needed = {file.blob for file in staying}
    blobs = tuple(dict.fromkeys(file.blob for file in going if file.blob not in needed and file.blob != file.path))
    return Removal(
        model,
        folder,
        names=tuple(file.path for file in going),
        blobs=blobs,
        freed=disk_bytes([*blobs, *(file.path for file in going)]),
        shared=tuple(_shared(going, staying, store, blobs)),
    )


def remove(removal: Removal) -> None:
    """Remove the files. After an interruption, run it again.

    Raises UsageError if the model is in use, and ResourceError if the disk refuses.
    """
    files = (*removal.names, *removal.blobs)
    with disk_errors(removal.folder), removing(files, removal.model.name):
        forget_use(removal.model.path)
        for path in files:
            path.unlink(missing_ok=True)
        if removal.model.place == LINK:
            shutil.rmtree(removal.folder, ignore_errors=True)
        else:
            tidy(removal.folder)


def tidy(folder: Path) -> None:
    """Remove an emptied repository's folders and its refs to missing snapshots."""
    snapshots = folder / "snapshots"
    for inside, _, _ in os.walk(snapshots, topdown=False):
        _remove_empty(Path(inside))
    refs = folder / "refs"
    for inside, _, names in os.walk(refs, topdown=False):
        for name in names:
            path = Path(inside, name)
            with suppress(OSError):
                if not (snapshots / read_text(path)).exists():
                    path.unlink()
        _remove_empty(Path(inside))
    _remove_empty(folder / "blobs")
    if not snapshots.exists() and not (folder / "blobs").exists():
        for rest in (".no_exist", "trees"):  # what huggingface_hub notes about snapshots
            shutil.rmtree(folder / rest, ignore_errors=True)
    _remove_empty(folder)


def disk_bytes(paths: Iterable[Path]) -> int:
    """Return the bytes freed by removing all these names: links have none, and other hard links keep theirs."""
    seen: dict[tuple[int, int], list[int]] = {}
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            size = 0 if stat.S_ISLNK(status.st_mode) else status.st_size
            seen.setdefault((status.st_dev, status.st_ino), [status.st_nlink, size, 0])[2] += 1
    return sum(size for links, size, names in seen.values() if names >= links)


def _shared(going: list[SnapshotFile], staying: list[SnapshotFile], store: Store, blobs: Iterable[Path]) -> list[str]:
    taken = {file.blob for file in going}
    shared = [f"{file.name} of {file.commit[:7]}" for file in staying if file.blob in taken]
    for blob in blobs:
        if blob.is_symlink():
            inside = store.root in symlink_target(blob).parents
            shared.append(
                "the hub's store of files that several repositories share (`hf cache prune` frees it)"
                if inside
                else f"the file it was imported from, {blob.resolve()}"
            )
    return shared


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()

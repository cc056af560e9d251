"""Taking a model out of the cache: what goes, what stays because something else needs it, and in which order.

Owns that decision and the order; must not ask anybody. Names go before bytes, so that an interruption leaves no name
without bytes behind; bytes without a name are found by collect.py.
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
from llmrun.models.store.disk import disk_errors
from llmrun.models.store.in_use import removing
from llmrun.models.store.installed import LINK, LM_STUDIO, OLLAMA, Installed
from llmrun.models.store.store import SnapshotFile, Store, one_step


@dataclass(frozen=True, slots=True)
class Removal:
    """What removing a model means.

    Attributes:
        model: which one.
        folder: of its repository, or of its plain link.
        names: files of snapshots that go.
        blobs: bytes that go with them.
        freed: bytes of disk that come free.
        shared: what else needs some of its bytes, so that those stay; untrusted text.
    """

    model: Installed
    folder: Path
    names: tuple[Path, ...]
    blobs: tuple[Path, ...]
    freed: int
    shared: tuple[str, ...]


def plan_removal(store: Store, model: Installed) -> Removal:
    """Find out what removing a model would do; changes nothing.

    Raises:
        UsageError: it is not ours to remove.
    """
    if model.place == OLLAMA:
        name = model.name.removeprefix("ollama/")
        raise UsageError(f"{model.name} belongs to Ollama", why="llmrun only uses it", hint=f"ollama rm {name}")
    if model.place == LM_STUDIO:
        raise UsageError(
            f"{model.name} belongs to LM Studio", why="llmrun only uses it", hint="delete it in LM Studio's My Models"
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
    """Do it. Run again after an interruption, it does the rest.

    Raises:
        UsageError: the model is in use.
        ResourceError: the disk refuses.
    """
    files = (*removal.names, *removal.blobs)
    with disk_errors(removal.folder), removing(files, removal.model.name):
        for path in files:
            path.unlink(missing_ok=True)
        if removal.model.place == LINK:
            shutil.rmtree(removal.folder, ignore_errors=True)
        else:
            tidy(removal.folder)


def tidy(folder: Path) -> None:
    """Take away what an emptied repository leaves: folders, and refs to snapshots that are gone."""
    snapshots = folder / "snapshots"
    for inside, _, _ in os.walk(snapshots, topdown=False):
        _remove_empty(Path(inside))
    refs = folder / "refs"
    for inside, _, names in os.walk(refs, topdown=False):
        for name in names:
            path = Path(inside, name)
            with suppress(OSError, ValueError):
                if not (snapshots / path.read_text(encoding="ascii").strip()).exists():
                    path.unlink()
        _remove_empty(Path(inside))
    _remove_empty(folder / "blobs")
    if not snapshots.exists() and not (folder / "blobs").exists():
        for rest in (".no_exist", "trees"):  # what huggingface_hub notes about snapshots
            shutil.rmtree(folder / rest, ignore_errors=True)
    _remove_empty(folder)


def disk_bytes(paths: Iterable[Path]) -> int:
    """Bytes that come free when all these names go: links have none, and hard links elsewhere keep theirs."""
    seen: dict[tuple[int, int], list[int]] = {}
    for path in paths:
        with suppress(OSError):
            fact = path.lstat()
            size = 0 if stat.S_ISLNK(fact.st_mode) else fact.st_size
            seen.setdefault((fact.st_dev, fact.st_ino), [fact.st_nlink, size, 0])[2] += 1
    return sum(size for links, size, names in seen.values() if names >= links)


def _shared(going: list[SnapshotFile], staying: list[SnapshotFile], store: Store, blobs: Iterable[Path]) -> list[str]:
    taken = {file.blob for file in going}
    shared = [f"{file.name} of {file.commit[:7]}" for file in staying if file.blob in taken]
    for blob in blobs:
        if blob.is_symlink():
            inside = store.root in one_step(blob).parents
            shared.append(
                "the hub's store of files that several repositories share (`hf cache prune` frees it)"
                if inside
                else f"the file it was imported from, {blob.resolve()}"
            )
    return shared


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()

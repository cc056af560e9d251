"""Removal of a model from the cache, and garbage collection.

Names go before bytes, so that an interruption leaves no broken name; collect() finds bytes without a name. The cache is
shared: files that another program may be writing stay, and so do files younger than a day, unless requested.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from llmrun.errors import UsageError
from llmrun.gguf import filenames
from llmrun.models.store.installed import LINK, LM_STUDIO, OLLAMA, OWN_FOLDER, InstalledModel
from llmrun.models.store.store import SnapshotFile, Store, symlink_target
from llmrun.models.store.use import forget_use, in_use, removing
from llmrun.storage import disk_errors
from llmrun.system import read_text


@dataclass(frozen=True, slots=True)
class Removal:
    """Effects of removing a model."""

    model: InstalledModel
    folder: Path  # of its repository, or of its plain link
    names: tuple[Path, ...]  # snapshot files to remove
    blobs: tuple[Path, ...]  # blobs to remove
    freed: int  # bytes on disk
    shared: tuple[str, ...]  # other users of its bytes, which therefore stay; untrusted text


def plan_removal(store: Store, model: InstalledModel) -> Removal:
    """Compute the effects of removing a model; change nothing. Raises UsageError if it is not ours."""
    if model.place == OLLAMA:
        name = model.name.removeprefix("ollama/")
        raise UsageError(f"{model.name} belongs to Ollama", why="llmrun only reads it", hint=f"ollama rm {name}")
    if model.place == LM_STUDIO:
        raise UsageError(
            f"{model.name} belongs to LM Studio", why="llmrun only reads it", hint="delete it in LM Studio's My Models"
        )
    if model.place == OWN_FOLDER:
        raise UsageError(
            f"{model.name} is in a folder of models.folders",
            why="llmrun only reads it",
            hint=f"rm {shlex.quote(str(model.path))}",
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


DAY_SECONDS = 86_400.0

_PART = re.compile(r"(?P<target>.+?)\.part(\.[a-z]+)?")  # see download/download.py
_INCOMPLETE = ".incomplete"  # huggingface_hub's
_LOCKS = frozenset({".lock", ".transfer"})
_TEMPORARY = re.compile(r".+\.\d+\.tmp|.+\.unchecked")


@dataclass(frozen=True, slots=True)
class Leftover:
    """Unneeded file."""

    path: Path
    n_bytes: int  # freed with it
    why: str  # reason it is unneeded
    keep: str = ""  # reason to keep it for now; "" to remove it
    lock: Path | None = None  # held by its writer; None when there is none
    folder: Path | None = None  # its repository's


def collect(store: Store, *, include_recent: bool = False, now: float | None = None) -> list[Leftover]:
    """Return all unneeded files of the cache, links before their bytes; change nothing.

    Args:
        include_recent: include files younger than a day, unless another program may be writing them.
        now: seconds since 1970.
    """
    now = time.time() if now is None else now
    search = _Search(store, now, youngest=now if include_recent else now - DAY_SECONDS)
    leftovers = [leftover for folder in store.repositories() for leftover in search.in_repository(folder)]
    return [*leftovers, *search.in_links(), *search.locks()]


def discard(leftovers: Iterable[Leftover]) -> int:
    """Remove the leftovers without a reason to stay; return the freed bytes.

    Raises ResourceError if the disk refuses.
    """
    freed = 0
    folders: dict[Path, None] = {}
    for leftover in leftovers:
        if leftover.keep:
            continue
        with disk_errors(leftover.path), _free(leftover.lock) as free:
            if free and not _gained_a_name(leftover):
                leftover.path.unlink(missing_ok=True)
                freed += leftover.n_bytes
        if leftover.folder:
            folders[leftover.folder] = None
    for folder in folders:
        tidy(folder)
    return freed


class _Search:
    """Search for garbage. Files modified after `youngest` (seconds since 1970) stay."""

    def __init__(self, store: Store, now: float, youngest: float) -> None:
        self.store = store
        self.now = now
        self.youngest = youngest

    def in_repository(self, folder: Path) -> Iterator[Leftover]:
        files = self.store.snapshot_files(folder)
        superseded = _superseded(folder, files)
        needed: set[Path] = set()
        for file in files:
            if not file.path.exists():
                yield self.leftover(file.path, "a name whose bytes are missing", folder=folder)
            elif file.path in superseded:
                why = f"an older revision; {superseded[file.path][:7]} has the same file"
                busy = "an llmrun process has it loaded" if in_use(file.path) else ""
                leftover = self.leftover(file.path, why, keep=busy, folder=folder)
                if leftover.keep:
                    needed.add(file.blob)
                yield leftover
            elif _TEMPORARY.fullmatch(file.name):
                yield self.leftover(file.path, "left by an interrupted installation", folder=folder)
            else:
                needed.add(file.blob)
        old = {file.blob for file in files if file.path in superseded}
        for path in _files(folder / "blobs"):
            if path not in needed:
                yield self.in_blobs(folder, path, "only an older revision has it" if path in old else "")

    def in_blobs(self, folder: Path, path: Path, why: str) -> Leftover:
        """Classify a file of blobs/ that no snapshot needs."""
        part = _PART.fullmatch(path.name)
        name = part["target"] if part else path.name.partition(".")[0]
        lock = self.store.root / ".locks" / folder.name / f"{name}.lock"
        if _TEMPORARY.fullmatch(path.name):
            why = "left by an interrupted import"
        elif part and path.with_name(name).exists():
            why = "part of a download that is complete"
        elif part:
            why = f"part of a download, {self.age(path)} old; `llmrun pull` would resume it"
        elif path.name.endswith(_INCOMPLETE):
            why = f"huggingface_hub's part of a download, {self.age(path)} old; huggingface_hub never resumes one"
            if self.now - _modified(path) < DAY_SECONDS:
                return self.leftover(path, why, keep="another program may be writing it", lock=lock, folder=folder)
        return self.leftover(path, why or "no snapshot refers to these bytes", lock=lock, folder=folder)

    def in_links(self) -> Iterator[Leftover]:
        """Yield leftovers of plain links: parts, and notes about missing files."""
        for folder in sorted(self.store.links.glob("*/")):
            lock = self.store.root / ".locks" / self.store.links.name / f"{folder.name}.lock"
            files = _files(folder)
            whole = any(filenames.is_model(path.name) for path in files)
            for path in files:
                if _PART.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name):
                    why = f"part of a download, {self.age(path)} old"
                    yield self.leftover(path, why, lock=lock, folder=folder)
                elif not whole:
                    yield self.leftover(path, "a note about a missing model", lock=lock, folder=folder)

    def locks(self) -> Iterator[Leftover]:
        """Yield lock files of finished downloads."""
        for folder in sorted((self.store.root / ".locks").glob("*/")):
            for path in _files(folder):
                blobs = self.store.root / folder.name / "blobs"
                if path.suffix in _LOCKS and not any(blobs.glob(f"{path.stem}.*")):
                    yield self.leftover(path, "the lock of a finished download", lock=path)

    def leftover(
        self, path: Path, why: str, *, keep: str = "", lock: Path | None = None, folder: Path | None = None
    ) -> Leftover:
        if not keep and _modified(path) > self.youngest:
            keep = f"only {self.age(path)} old; --all includes it"
        if lock is not None:
            with _free(lock) as free:
                keep = keep if free else "it is being downloaded right now"
        return Leftover(path, _used_bytes(path), why, keep, lock, folder)

    def age(self, path: Path) -> str:
        """E.g. "3 days"."""
        seconds = max(self.now - _modified(path), 0.0)
        for unit, length in (("day", DAY_SECONDS), ("hour", 3600.0), ("minute", 60.0), ("second", 1.0)):
            if seconds >= length:
                count = int(seconds // length)
                return f"{count} {unit}{'s' * (count > 1)}"
        return "less than a second"


def _superseded(folder: Path, files: list[SnapshotFile]) -> dict[Path, str]:
    """Map model files that a newer snapshot has too to that snapshot's commit.

    A snapshot that a ref (branch or tag) names never counts as old; otherwise the newest wins.
    """
    refs = {read_text(Path(inside, name)) for inside, _, names in os.walk(folder / "refs") for name in names}
    by_name: dict[str, list[SnapshotFile]] = {}
    for file in files:
        if filenames.is_model(file.name) and file.path.exists():
            by_name.setdefault(file.name, []).append(file)
    superseded: dict[Path, str] = {}
    for same in by_name.values():
        ranked = sorted(same, key=lambda file: (file.commit in refs, _modified(file.path)))
        for file in ranked[:-1]:
            if file.commit not in refs:
                superseded[file.path] = ranked[-1].commit
    return superseded


def _gained_a_name(leftover: Leftover) -> bool:
    """Return whether a snapshot refers to these bytes since the search."""
    folder, path = leftover.folder, leftover.path
    if folder is None or path.parent != folder / "blobs" or "." in path.name:
        return False
    return any(
        symlink_target(Path(inside, name)) == path
        for inside, _, names in os.walk(folder / "snapshots")
        for name in names
    )


# ---- locks -----------------------------------------------------------------------------------------


@contextmanager
def _free(lock: Path | None) -> Iterator[bool]:
    """Hold an existing lock; yield whether that succeeded."""
    if lock is None or not lock.exists():
        yield True
        return
    try:
        held = FileLock(lock).acquire(timeout=0)
    except Timeout:
        yield False
        return
    with held:
        yield True


# ---- the disk --------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_symlink() or path.is_file())
    except OSError:
        return []


def _used_bytes(path: Path) -> int:
    """Return the bytes on disk; a part that arrives in pieces is sparse."""
    n_bytes = disk_bytes([path])
    if sys.platform != "win32" and _PART.fullmatch(path.name):
        with suppress(OSError):
            n_bytes = min(n_bytes, path.lstat().st_blocks * 512)
    return n_bytes


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0

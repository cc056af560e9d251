"""What lies in the cache and is of no use to anybody: found, explained, taken away.

Owns what counts as garbage; must not ask anybody. The cache is shared: what another program may be writing right now is
left alone, and so is everything younger than a day, unless it is asked for.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llmrun.gguf import filenames
from llmrun.models.store.disk import disk_errors
from llmrun.models.store.in_use import in_use
from llmrun.models.store.removal import disk_bytes, tidy
from llmrun.models.store.store import SnapshotFile, Store, one_step

DAY_SECONDS = 86_400.0

_PART = re.compile(r"(?P<target>.+?)\.part(\.[a-z]+)?")  # bytes on their way, and the notes beside them
_INCOMPLETE = ".incomplete"  # huggingface_hub's
_LOCKS = frozenset({".lock", ".transfer"})
_TEMPORARY = re.compile(r".+\.\d+\.tmp|.+\.unchecked")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file of no use.

    Attributes:
        path: of the file.
        n_bytes: of disk that come free with it.
        why: it is of no use.
        keep: why it stays all the same, for now; empty when it can go.
        lock: held by whoever writes it; None when nobody can.
        folder: of its repository.
    """

    path: Path
    n_bytes: int
    why: str
    keep: str = ""
    lock: Path | None = None
    folder: Path | None = None


def collect(store: Store, *, young_too: bool = False, now: float | None = None) -> list[Leftover]:
    """Everything in the cache that is of no use, links before the bytes they lead to; changes nothing.

    Args:
        young_too: also what is younger than a day, except where another program may be at it.
        now: seconds since 1970.
    """
    youngest = (time.time() if now is None else now) - (0.0 if young_too else DAY_SECONDS)
    search = _Search(store, time.time() if now is None else now, youngest)
    found = [leftover for folder in store.repositories() for leftover in search.in_repository(folder)]
    return [*found, *search.in_links(), *search.locks()]


def discard(leftovers: Iterable[Leftover]) -> int:
    """Take away what need not be kept; gives the bytes that came free.

    Raises:
        ResourceError: the disk refuses.
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
    """One look through a cache. Older than `youngest` is old, in seconds since 1970."""

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
                yield self.leftover(file.path, "its bytes are gone, so the name leads nowhere", folder=folder)
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
        """A file of blobs/ that no snapshot needs."""
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
            why = f"huggingface_hub's part of a download, {self.age(path)} old; it never resumes one"
            if self.now - _modified(path) < DAY_SECONDS:
                return self.leftover(path, why, keep="another program may be writing it", lock=lock, folder=folder)
        return self.leftover(path, why or "no snapshot refers to these bytes", lock=lock, folder=folder)

    def in_links(self) -> Iterator[Leftover]:
        """Models of plain links: parts, and notes about files that are gone."""
        for folder in sorted(self.store.links.glob("*/")):
            lock = self.store.root / ".locks" / self.store.links.name / f"{folder.name}.lock"
            files = _files(folder)
            whole = any(filenames.is_model(path.name) for path in files)
            for path in files:
                if _PART.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name):
                    why = f"part of a download, {self.age(path)} old"
                    yield self.leftover(path, why, lock=lock, folder=folder)
                elif not whole:
                    yield self.leftover(path, "a note about a model that is gone", lock=lock, folder=folder)

    def locks(self) -> Iterator[Leftover]:
        """Lock files of downloads that are over."""
        for folder in sorted((self.store.root / ".locks").glob("*/")):
            for path in _files(folder):
                blobs = self.store.root / folder.name / "blobs"
                if path.suffix in _LOCKS and not any(blobs.glob(f"{path.stem}.*")):
                    yield self.leftover(path, "the lock of a download that is over", lock=path)

    def leftover(
        self, path: Path, why: str, *, keep: str = "", lock: Path | None = None, folder: Path | None = None
    ) -> Leftover:
        if not keep and _modified(path) > self.youngest:
            keep = f"only {self.age(path)} old; --all takes it too"
        if lock is not None and _held(lock):
            keep = "it is being downloaded right now"
        return Leftover(path, _used_bytes(path), why, keep, lock, folder)

    def age(self, path: Path) -> str:
        """E.g. "3 days"."""
        seconds = max(self.now - _modified(path), 0.0)
        for unit, length in (("day", DAY_SECONDS), ("hour", 3600.0), ("minute", 60.0)):
            if seconds >= length:
                count = int(seconds // length)
                return f"{count} {unit}{'s' * (count > 1)}"
        return f"{seconds:.0f} seconds"


def _superseded(folder: Path, files: list[SnapshotFile]) -> dict[Path, str]:
    """Model files that a newer snapshot has too -> that snapshot's commit.

    What a ref (a branch or tag) stands at is never old; else the newest snapshot wins.
    """
    named = {_text(path) for inside, _, names in os.walk(folder / "refs") for path in map(Path(inside).joinpath, names)}
    by_name: dict[str, list[SnapshotFile]] = {}
    for file in files:
        if filenames.is_model(file.name) and file.path.exists():
            by_name.setdefault(file.name, []).append(file)
    found: dict[Path, str] = {}
    for same in by_name.values():
        ranked = sorted(same, key=lambda file: (file.commit in named, _modified(file.path)))
        for file in ranked[:-1]:
            if file.commit not in named:
                found[file.path] = ranked[-1].commit
    return found


def _gained_a_name(leftover: Leftover) -> bool:
    """Whether a snapshot refers to these bytes now, though none did when they were found."""
    folder, path = leftover.folder, leftover.path
    if folder is None or path.parent != folder / "blobs" or "." in path.name:
        return False
    return any(
        one_step(Path(inside, name)) == path for inside, _, names in os.walk(folder / "snapshots") for name in names
    )


# ---- locks -----------------------------------------------------------------------------------------


@contextmanager
def _free(lock: Path | None) -> Iterator[bool]:
    """Hold a lock that exists; yields whether that worked."""
    if lock is None or not lock.exists():
        yield True
        return
    from filelock import FileLock, Timeout

    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        held.release()


def _held(lock: Path) -> bool:
    with _free(lock) as free:
        return not free


# ---- the disk --------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_symlink() or path.is_file())
    except OSError:
        return []


def _used_bytes(path: Path) -> int:
    """Of disk; a part that arrives in pieces has holes."""
    n_bytes = disk_bytes([path])
    if _PART.fullmatch(path.name):
        with suppress(OSError, AttributeError):  # Windows does not tell
            n_bytes = min(n_bytes, path.lstat().st_blocks * 512)
    return n_bytes


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""

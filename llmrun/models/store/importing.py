"""Import of local GGUF files into the cache.

An imported model gets a repository of its own, so that every other command treats it like a downloaded one:
blobs/<sha256>, and a snapshot whose commit derives from name and hash.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Literal

from llmrun.errors import IntegrityError, UsageError
from llmrun.gguf import filenames
from llmrun.gguf.reader import read_header
from llmrun.models.download.download import OnProgress, ignore_progress
from llmrun.models.fingerprint import OnBytes, sha256_of
from llmrun.models.registry import IMPORTED, ModelSpec
from llmrun.models.store import other_programs
from llmrun.models.store.installed import InstalledModel
from llmrun.models.store.new_file import exclusive, require_space
from llmrun.models.store.store import Store
from llmrun.storage import disk_errors, sync_folder

How = Literal["copy", "move", "link"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_CLONE_FILE = 0x40049409  # FICLONE of linux/fs.h: both files share their blocks until one is written to
_CHUNK_BYTES = 4 << 20


def import_model(
    source: Path,
    store: Store,
    *,
    name: str = "",
    how: How = "copy",
    on_progress: OnProgress = ignore_progress,
) -> InstalledModel:
    """Put a model file, with all its parts if it is split, into the cache.

    Args:
        source: the (first) file.
        name: "owner/name", or "name" for "local/name"; by default made of the file's own name.
        how: "copy" keeps the file, "move" removes it, "link" leaves the bytes in place.

    Raises:
        BadModelError, ModelNotFoundError: it is not a GGUF model, or does not exist.
        UsageError: the name is invalid.
        DiskFullError: there is no room for a copy.
        IntegrityError: the file changed while it was copied.
    """
    header = read_header(source)
    if how == "move":
        _refuse_foreign(source, store)
    repository = name if "/" in name else f"{IMPORTED}{name or filenames.model_name(source.name)}"
    if not _NAME.fullmatch(repository) or ".." in repository or "--" in repository:
        raise UsageError(f"{repository!r} is not a valid model name", hint="--name tiny, or --name owner/tiny")
    parts = [source.with_name(part) for part in filenames.all_parts(source.name)]
    names = [_filename(path, repository, header.quant) for path in parts]
    if not filenames.is_model(names[0]):
        raise UsageError(f"{source.name} is not a model by itself", why="it is a projector or an importance matrix")
    total = sum(path.stat().st_size for path in parts)
    if how != "link" and not (how == "move" and _same_disk(source, store.root)):
        with disk_errors(store.root):
            require_space(store.root, total)
    done = 0

    def count(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        on_progress(done, total)

    for path, filename in zip(parts, names, strict=True):
        _store_part(path, filename, repository, store, how, count)
    installed = store.find(ModelSpec(repository, repository=repository, filename=names[0]))
    assert installed is not None, "just installed"
    return installed


def _refuse_foreign(source: Path, store: Store) -> None:
    """Raise if moving would take a file from a folder where other programs look for it."""
    real = source.resolve()
    elsewhere = source.is_symlink() or store.root.resolve() in real.parents
    if elsewhere or any(model.path.resolve() == real for model in other_programs.models()):
        raise UsageError(
            f"{str(source)!r} can't be moved", why="others look for it there", hint="leave --move away to copy it"
        )


def _store_part(source: Path, filename: str, repository: str, store: Store, how: How, on_bytes: OnBytes) -> None:
    """Store one file's bytes in blobs/, then its name in a snapshot; the bytes always have at least one name."""
    blobs = store.blob(repository, "0").parent
    arriving = blobs / f"{filename}.{os.getpid()}.tmp"
    with disk_errors(arriving, lambda: source.stat().st_size):
        blobs.mkdir(parents=True, exist_ok=True)
        try:
            sha256 = _transfer(source, arriving, how, on_bytes)
            blob = store.blob(repository, sha256)
            with exclusive(store.lock(repository, sha256)):
                if not (how == "link" and blob.exists()):
                    arriving.replace(blob)
                sync_folder(blobs)
                commit = hashlib.sha256(f"{filename} {sha256}".encode()).hexdigest()[:40]
                store.install(repository, _commit_of(store, repository, filename, commit), filename, sha256)
        finally:
            arriving.unlink(missing_ok=True)
        if how == "move":
            source.unlink()


def _transfer(source: Path, target: Path, how: How, on_bytes: OnBytes) -> str:
    """Link, move or copy the bytes to `target`; return their sha256."""
    if how == "link":
        target.symlink_to(source.resolve())
        return sha256_of(source, on_bytes)
    if how == "move":
        try:
            os.link(source, target)
        except OSError:  # another disk, or one without hard links
            return _copy(source, target, on_bytes)
        return sha256_of(target, on_bytes)
    return _copy(source, target, on_bytes)


def _commit_of(store: Store, repository: str, filename: str, commit: str) -> str:
    """Return the snapshot for a file: all parts of a split model share the first one's."""
    name = filenames.all_parts(filename)[0]
    if filename == name:
        return commit
    first = [file for file in store.snapshot_files(store.blob(repository, "0").parents[1]) if file.name == name]
    return max(first, key=lambda file: file.path.lstat().st_mtime_ns).commit if first else commit


def _copy(source: Path, target: Path, on_bytes: OnBytes) -> str:
    """Copy a file, sharing blocks where the disk can; return the copy's sha256."""
    if _clone(source, target):
        return sha256_of(target, on_bytes)
    digest = hashlib.sha256()
    done = 0
    with source.open("rb", buffering=0) as reading, target.open("wb", buffering=0) as writing:
        before = os.fstat(reading.fileno())
        while done <= before.st_size and (chunk := reading.read(_CHUNK_BYTES)):
            rest = memoryview(chunk)
            while rest:
                rest = rest[writing.write(rest) :]
            digest.update(chunk)
            done += len(chunk)
            on_bytes(len(chunk))
        os.fsync(writing.fileno())
        after = os.fstat(reading.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or done != after.st_size:
        raise IntegrityError(f"{str(source)!r} changed while it was copied", hint="run the same command again")
    return digest.hexdigest()


def _clone(source: Path, target: Path) -> bool:
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        with source.open("rb") as reading, target.open("wb") as writing:
            fcntl.ioctl(writing.fileno(), _CLONE_FILE, reading.fileno())
            os.fsync(writing.fileno())
    except OSError:  # another disk, or no support
        return False
    return True


def _same_disk(source: Path, root: Path) -> bool:
    while not root.exists() and root != root.parent:
        root = root.parent
    return source.resolve().stat().st_dev == root.stat().st_dev


def _filename(path: Path, repository: str, quant: str) -> str:
    """Return the file's name in the repository: its own if valid, else one made of repository and quant."""
    if path.name.lower().endswith(".gguf") and path.name.isprintable() and ":" not in path.name:
        return path.name
    return repository.rpartition("/")[2] + (f"-{quant}" if quant else "") + ".gguf"

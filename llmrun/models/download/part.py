"""Partial download: the first bytes of a file, and their hash.

Owns `<target>.part` and the small file beside it; must not know the network. Bytes are appended unbuffered, so that the
process may be killed at any moment: the length of the part is what has arrived.

    <target>.part        the file's first bytes
    <target>.part.from   for a file without a known hash: the server's name of this version (ETag or date)
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from llmrun.storage import sync_folder

CHUNK_BYTES = 1 << 20
_LONGEST_VERSION = 1024


class WrongBytesError(Exception):
    """Mismatch between the bytes and the promised size or sha256."""


def part_path(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def arrived_bytes(target: Path, size: int) -> int:
    """Return the number of bytes an earlier run has left of a target of this size."""
    try:
        length = part_path(target).stat().st_size
    except OSError:
        return 0
    return length if length <= size else 0


class DownloadPart:
    """Partial download.

    Args:
        target: final path, in an existing folder.
        size: in bytes, None when unknown.
        sha256: lower-case hex, None when unknown.

    Raises (all methods):
        OSError: from the disk; bytes that arrived before remain.
    """

    def __init__(self, target: Path, size: int | None, sha256: str | None) -> None:
        self.target = target
        self.path = part_path(target)
        self._version_path = self.path.with_name(self.path.name + ".from")
        self._sha256 = sha256
        self.size = size
        self.arrived = 0
        self._digest = hashlib.sha256()
        self._hashed = 0

    def __enter__(self) -> DownloadPart:
        self.path.touch()
        # Unbuffered: written bytes survive a kill.
        self._file = cast(BinaryIO, self.path.open("r+b", buffering=0))
        self.arrived = self._file.seek(0, os.SEEK_END)
        if not self.resumable or (self.size is not None and self.arrived > self.size):
            self.restart()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._file.close()
        is_useful = self.arrived and self.resumable
        if kind is not None and (issubclass(kind, WrongBytesError) or not is_useful):
            self.path.unlink(missing_ok=True)
            self._version_path.unlink(missing_ok=True)

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived, verified or not."""
        return self.size is not None and self.arrived >= self.size

    @property
    def unhashed(self) -> int:
        return self.arrived - self._hashed if self._sha256 else 0

    def append(self, chunk: bytes) -> None:
        """Write the next bytes; drop those beyond the file's end."""
        rest = memoryview(chunk)
        if self.size is not None:
            rest = rest[: self.size - self.arrived]
        while rest:
            written = self._file.write(rest)
            if self._hashed == self.arrived:
                self._digest.update(rest[:written])
                self._hashed += written
            self.arrived += written
            rest = rest[written:]

    def restart(self) -> None:
        """Discard every byte."""
        self._file.truncate(0)
        self.arrived = self._file.seek(0)
        self._digest = hashlib.sha256()
        self._hashed = 0

    # ---- version of the file, where no hash is known

    @property
    def resumable(self) -> bool:
        """Whether a later run can tell that these bytes belong to the file it fetches."""
        return bool(self._sha256 or self.version)

    @property
    def version(self) -> str:
        """Version recorded by remember(), also by an earlier run; "" when none."""
        try:
            return self._version_path.read_text(encoding="ascii")
        except (OSError, ValueError):
            return ""

    def remember(self, version: str) -> None:
        """Record the server's name of this version; without one, nothing can be resumed."""
        if not version or len(version) > _LONGEST_VERSION or not version.isascii():
            self._version_path.unlink(missing_ok=True)
        elif version != self.version:
            self._version_path.write_text(version, encoding="ascii")

    # ---- the end

    def hash_some(self) -> bool:
        """Hash a few of the bytes that an earlier run has left; return whether there were any."""
        if not self.unhashed:
            return False
        self._file.seek(self._hashed)
        chunk = self._file.read(min(CHUNK_BYTES, self.unhashed))
        self._file.seek(self.arrived)
        self._digest.update(chunk)
        self._hashed += len(chunk)
        return bool(chunk)

    def install(self) -> None:
        """Verify the bytes and move them to the target, once hash_some() has nothing left to do.

        Raises WrongBytesError for other bytes than promised; they are deleted when the block ends.
        """
        if self.size is not None and self.arrived != self.size:
            raise WrongBytesError(f"{self.arrived} bytes arrived, expected {self.size}")
        if self._sha256 not in (None, self._digest.hexdigest()):
            raise WrongBytesError(f"the sha256 is {self._digest.hexdigest()}, expected {self._sha256}")
        os.fsync(self._file.fileno())
        self._file.close()
        self.path.replace(self.target)
        self._version_path.unlink(missing_ok=True)
        sync_folder(self.target.parent)

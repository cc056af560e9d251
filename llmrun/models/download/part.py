"""Partial download: arrived bytes, their places in the file, and their hash.

Owns `<target>.part` and the small files beside it; must not know the network. Every byte is written at its final place
and recorded afterwards, so that the process may be killed at any moment: recorded bytes are present.

    <target>.part        the bytes. Without a map they are the file's first ones, up to its length
    <target>.part.map    for a file that arrives in pieces: the number of arrived bytes per piece
    <target>.part.from   for a file without a known hash: the server's name of this version (ETag or date)
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from llmrun.storage import sync_folder

CHUNK_BYTES = 1 << 20
SEVERAL_PIECES_BYTES = 128 << 20
"""Files from this size on arrive in pieces. A smaller file has arrived before more connections would help."""
_SMALLEST_PIECE, _LARGEST_PIECE = 8 << 20, 64 << 20
_LONGEST_VERSION = 1024


class WrongBytesError(Exception):
    """Mismatch between the bytes and the promised size or sha256."""


class ClaimLostError(Exception):
    """Write to a piece whose claim was revoked."""


@dataclass(slots=True, eq=False)
class DownloadPiece:
    """Range of bytes of the file."""

    start: int  # of its first byte
    end: int | None  # after its last byte, None while unknown
    arrived: int = 0  # bytes, from its start on

    @property
    def position(self) -> int:
        """Offset of its next byte."""
        return self.start + self.arrived

    @property
    def whole(self) -> bool:
        return self.end is not None and self.position >= self.end


@dataclass(slots=True, eq=False)
class Claim:
    """Right to write a piece, until it is released or revoked."""

    piece: DownloadPiece
    valid: bool = True


def part_path(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def arrived_bytes(target: Path, size: int) -> int:
    """Return the number of bytes an earlier run has left of a target of this size."""
    path = part_path(target)
    try:
        length = path.stat().st_size
    except OSError:
        return 0
    counts = _Map(path, size).read() if size >= SEVERAL_PIECES_BYTES else None
    if counts is None:
        return length if length <= size else 0
    return sum(counts)


class DownloadPart:
    """Partial download. Several threads may write, each to the piece it has claimed.

    Args:
        target: final path, in an existing folder.
        size: in bytes, None when unknown.
        sha256: lower-case hex, None when unknown.

    Raises (all methods):
        OSError: from the disk; bytes recorded before remain.
    """

    def __init__(self, target: Path, size: int | None, sha256: str | None) -> None:
        self.target = target
        self.path = part_path(target)
        self._version_path = self.path.with_name(self.path.name + ".from")
        self._sha256 = sha256
        self.size = size
        self._digest = hashlib.sha256()
        self._hashed = 0
        self._lock = threading.Lock()
        self._claims: list[Claim] = []
        self._map: _Map | None = None
        self._pieces: list[DownloadPiece] = []

    def __enter__(self) -> DownloadPart:
        self.path.touch()
        # Unbuffered: written bytes survive a kill.
        self._file = cast(BinaryIO, self.path.open("r+b", buffering=0))
        length = os.fstat(self._file.fileno()).st_size
        if not self.resumable or (self.size is not None and length > self.size):
            self._truncate()
            length = 0
        if self._sha256 and self.size and self.size >= SEVERAL_PIECES_BYTES:
            self._map = _Map(self.path, self.size)
            self._pieces = self._map.open(length)
        else:
            self._pieces = [DownloadPiece(0, self.size, length)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        with self._lock:
            self._revoke()
            self._close()
        is_useful = self.arrived and self.resumable
        if kind is not None and (issubclass(kind, WrongBytesError) or not is_useful):
            self._delete()

    @property
    def arrived(self) -> int:
        return sum(piece.arrived for piece in self._pieces)

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived, verified or not."""
        return all(piece.whole for piece in self._pieces)

    @property
    def in_pieces(self) -> bool:
        """Whether several connections may write at once."""
        return self._map is not None

    @property
    def unhashed(self) -> int:
        return self.arrived - self._hashed if self._sha256 else 0

    def claim(self) -> Claim | None:
        """Claim the first piece that is neither whole nor claimed; None when there is none."""
        with self._lock:
            taken = {id(claim.piece) for claim in self._claims}
            for piece in self._pieces:
                if not piece.whole and id(piece) not in taken:
                    self._claims.append(Claim(piece))
                    return self._claims[-1]
        return None

    def release(self, claim: Claim) -> None:
        """Give a piece up; ignore further writes by this claim."""
        with self._lock:
            claim.valid = False
            if claim in self._claims:
                self._claims.remove(claim)

    def write(self, claim: Claim, chunk: bytes) -> None:
        """Append bytes to a piece; drop those beyond its end. Raises ClaimLostError if the piece was revoked."""
        with self._lock:
            if not claim.valid:
                raise ClaimLostError
            piece = claim.piece
            rest = memoryview(chunk)
            if piece.end is not None:
                rest = rest[: piece.end - piece.position]
            self._file.seek(piece.position)
            while rest:
                written = self._file.write(rest)
                piece.arrived += written
                rest = rest[written:]
            if self._map:
                self._map.note(self._pieces.index(piece), piece.arrived)

    def ends_at(self, claim: Claim, size: int) -> None:
        """Set the size of a file of unknown size; its only piece is claimed."""
        with self._lock:
            if not claim.valid:
                raise ClaimLostError
            self.size = claim.piece.end = size

    def restart(self, claim: Claim | None = None) -> None:
        """Discard every byte and continue with a single piece.

        Args:
            claim: moves to that piece; all others are revoked.
        """
        with self._lock:
            if claim is not None and not claim.valid:
                raise ClaimLostError
            self._truncate()
            self._revoke(but=claim)
            self._pieces = [DownloadPiece(0, self.size)]
            if claim is not None:
                claim.piece = self._pieces[0]

    def _truncate(self) -> None:
        # First the bytes: a map without them is harmless, holes without a map are not.
        self._file.truncate(0)
        if self._map:
            self._map.close()
            self._map = None
        _Map.delete_of(self.path)
        self._digest = hashlib.sha256()
        self._hashed = 0

    def _revoke(self, but: Claim | None = None) -> None:
        for claim in self._claims:
            claim.valid = claim is but
        self._claims = [claim for claim in self._claims if claim.valid]

    @property
    def resumable(self) -> bool:
        """Whether a later run can tell that these bytes belong to the file it fetches."""
        return bool(self._sha256 or self.version)

    # ---- version of the file, where no hash is known

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
        """Hash a few more arrived bytes, in file order; return whether there were any."""
        if self._sha256 is None:
            return False
        with self._lock:
            self._file.seek(self._hashed)
            chunk = self._file.read(min(CHUNK_BYTES, self._in_order() - self._hashed))
            self._hashed += len(chunk)
            digest = self._digest
        digest.update(chunk)  # outside the lock: others may write meanwhile
        return bool(chunk)

    def _in_order(self) -> int:
        """Return the number of bytes from the file's beginning without a gap."""
        for piece in self._pieces:
            if not piece.whole:
                return piece.position
        return self._pieces[-1].position

    def install(self) -> None:
        """Verify the bytes and move them to the target, once hash_some() has nothing left to do.

        Raises WrongBytesError for other bytes than promised; they are deleted when the block ends.
        """
        if self.size is not None and self.arrived != self.size:
            raise WrongBytesError(f"{self.arrived} bytes arrived, expected {self.size}")
        if self._sha256 not in (None, self._digest.hexdigest()):
            raise WrongBytesError(f"the sha256 is {self._digest.hexdigest()}, expected {self._sha256}")
        os.fsync(self._file.fileno())
        self._close()
        # The map goes first: without it a whole part still counts as whole.
        _Map.delete_of(self.path)
        self.path.replace(self.target)
        self._version_path.unlink(missing_ok=True)
        sync_folder(self.target.parent)

    def _close(self) -> None:
        self._file.close()
        if self._map:
            self._map.close()

    def _delete(self) -> None:
        self.path.unlink(missing_ok=True)
        _Map.delete_of(self.path)
        self._version_path.unlink(missing_ok=True)


class _Map:
    """Arrived bytes per piece: a header, then one 32-bit count per piece.

    A count is four aligned bytes, so that a kill can't leave half of one.
    """

    _HEADER = struct.Struct("<8sQQ")  # magic, size of the file, size of a piece
    _COUNT = struct.Struct("<I")
    _MAGIC = b"llmpart1"

    def __init__(self, part: Path, size: int) -> None:
        self.part = part
        self.size = size
        self.piece_bytes = min(max(size // 64 >> 20 << 20, _SMALLEST_PIECE), _LARGEST_PIECE)
        self._file: BinaryIO | None = None

    @staticmethod
    def _path(part: Path) -> Path:
        return part.with_name(part.name + ".map")

    @classmethod
    def delete_of(cls, part: Path) -> None:
        cls._path(part).unlink(missing_ok=True)

    def read(self) -> list[int] | None:
        """Return the counts, limited to what the part can hold; None without a map of this file."""
        try:
            data = self._path(self.part).read_bytes()
            length = self.part.stat().st_size
        except OSError:
            return None
        starts = self._starts()
        header = self._HEADER.pack(self._MAGIC, self.size, self.piece_bytes)
        if data[: len(header)] != header or len(data) != len(header) + len(starts) * self._COUNT.size:
            return None
        counts = struct.unpack_from(f"<{len(starts)}I", data, len(header))
        return [
            max(0, min(count, self.piece_bytes, self.size - start, length - start))
            for start, count in zip(starts, counts, strict=True)
        ]

    def open(self, length: int) -> list[DownloadPiece]:
        """Open the map for notes and return the pieces as an earlier run has left them.

        Args:
            length: of the part; without a map all its bytes count as arrived.
        """
        counts = self.read()
        if counts is None:
            counts = [max(0, min(self.piece_bytes, length - start)) for start in self._starts()]
        path = self._path(self.part)
        fresh = self.part.with_name(self.part.name + ".tmp")
        header = self._HEADER.pack(self._MAGIC, self.size, self.piece_bytes)
        fresh.write_bytes(header + struct.pack(f"<{len(counts)}I", *counts))
        fresh.replace(path)
        self._file = cast(BinaryIO, path.open("r+b", buffering=0))
        ends = [min(start + self.piece_bytes, self.size) for start in self._starts()]
        return [DownloadPiece(*facts) for facts in zip(self._starts(), ends, counts, strict=True)]

    def note(self, index: int, count: int) -> None:
        if self._file:
            self._file.seek(self._HEADER.size + index * self._COUNT.size)
            self._file.write(self._COUNT.pack(count))

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _starts(self) -> range:
        return range(0, self.size, self.piece_bytes)

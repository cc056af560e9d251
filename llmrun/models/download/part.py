"""A file that is on its way: the bytes that have arrived, where they belong, and their hash.

Owns `<target>.part` and the small file beside it; must not know the network. Every byte is written at its final place
and noted after it was written, so that a process may be killed at any moment: what is noted is there.

    <target>.part        the bytes. Without a map they are the file's first ones, and its length says how many
    <target>.part.map    of a file that arrives in pieces: how many bytes of each are there
    <target>.part.from   of a file whose hash nobody knows: what the server calls this version of it
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
"""Files from this size on arrive in pieces: below, a single connection is done before others would help."""
_SMALLEST_PIECE, _LARGEST_PIECE = 8 << 20, 64 << 20
_LONGEST_VERSION = 1024


class WrongBytesError(Exception):
    """The bytes are not the promised ones; says why."""


class ClaimLostError(Exception):
    """Somebody writes a piece that was taken away from them."""


@dataclass(slots=True, eq=False)
class DownloadPiece:
    """A run of bytes of the file.

    Attributes:
        start: of its first byte.
        end: behind its last byte, None while nobody knows.
        there: bytes that have arrived, from its start on.
    """

    start: int
    end: int | None
    there: int = 0

    @property
    def position(self) -> int:
        """Where its next byte belongs."""
        return self.start + self.there

    @property
    def whole(self) -> bool:
        """Whether all of it is there."""
        return self.end is not None and self.position >= self.end


@dataclass(slots=True, eq=False)
class Claim:
    """The right to write a piece, until it is given back or taken away."""

    piece: DownloadPiece
    valid: bool = True


def part_path(target: Path) -> Path:
    """Where the bytes are while the target is not there."""
    return target.with_name(target.name + ".part")


def arrived_bytes(target: Path, size: int) -> int:
    """How many bytes of a target of this size an earlier run has left; 0 when there are none."""
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
    """A file that is on its way. Several threads may write, each the piece it has claimed.

    Args:
        target: where it belongs in the end; its folder is there.
        size: in bytes, None when nobody knows.
        sha256: lower-case hex, None when nobody knows.

    Raises (all methods):
        OSError: from the disk; what was noted before stays.
    """

    def __init__(self, target: Path, size: int | None, sha256: str | None) -> None:
        self.target = target
        self.path = part_path(target)
        self._version_path = self.path.with_name(self.path.name + ".from")
        self._sha256 = sha256
        self._size = size
        self._digest = hashlib.sha256()
        self._hashed = 0
        self._lock = threading.Lock()
        self._claims: list[Claim] = []
        self._map: _Map | None = None
        self._pieces: list[DownloadPiece] = []

    def __enter__(self) -> DownloadPart:
        self.path.touch()
        # Unbuffered: what was written survives even when we are killed.
        self._file = cast(BinaryIO, self.path.open("r+b", buffering=0))
        length = os.fstat(self._file.fileno()).st_size
        if not self.resumable or (self._size is not None and length > self._size):
            self._truncate()
            length = 0
        if self._sha256 and self._size and self._size >= SEVERAL_PIECES_BYTES:
            self._map = _Map(self.path, self._size)
            self._pieces = self._map.open(length)
        else:
            self._pieces = [DownloadPiece(0, self._size, length)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        with self._lock:
            self._revoke()
            self._close()
        of_use = self.arrived and self.resumable
        if kind is not None and (issubclass(kind, WrongBytesError) or not of_use):
            self._delete()

    # ---- what is there

    @property
    def arrived(self) -> int:
        """Bytes there."""
        return sum(piece.there for piece in self._pieces)

    @property
    def size(self) -> int | None:
        """Of the whole file, as far as anybody knows."""
        return self._size

    @property
    def complete(self) -> bool:
        """Whether every byte is there, right or wrong."""
        return all(piece.whole for piece in self._pieces)

    @property
    def in_pieces(self) -> bool:
        """Whether several may write at once."""
        return self._map is not None

    @property
    def unhashed(self) -> int:
        """Bytes there that hash_some() has not seen."""
        return self.arrived - self._hashed if self._sha256 else 0

    # ---- writing

    def claim(self) -> Claim | None:
        """The first piece that is neither whole nor claimed; None when there is none."""
        with self._lock:
            taken = {id(claim.piece) for claim in self._claims}
            for piece in self._pieces:
                if not piece.whole and id(piece) not in taken:
                    self._claims.append(Claim(piece))
                    return self._claims[-1]
        return None

    def give_back(self, claim: Claim) -> None:
        """Nobody writes this piece any more, or its writer is not heard from."""
        with self._lock:
            claim.valid = False
            if claim in self._claims:
                self._claims.remove(claim)

    def write(self, claim: Claim, chunk: bytes) -> None:
        """Put the next bytes of a piece in their place; what is beyond its end is dropped.

        Raises:
            ClaimLostError: the piece was taken away.
        """
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
                piece.there += written
                rest = rest[written:]
            if self._map:
                self._map.note(self._pieces.index(piece), piece.there)

    def ends_at(self, claim: Claim, size: int) -> None:
        """The size of a file that came without one; its only piece is claimed."""
        with self._lock:
            if not claim.valid:
                raise ClaimLostError
            self._size = claim.piece.end = size

    def restart(self, claim: Claim | None = None) -> None:
        """Forget every byte, and have only one piece from now on.

        Args:
            claim: goes on with that piece; all others are taken away.
        """
        with self._lock:
            if claim is not None and not claim.valid:
                raise ClaimLostError
            self._truncate()
            self._revoke(but=claim)
            self._pieces = [DownloadPiece(0, self._size)]
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
        """Whether a later run could tell that these bytes belong to the file it fetches."""
        return bool(self._sha256 or self.version)

    # ---- which version of the file this is, where no hash says so

    @property
    def version(self) -> str:
        """What remember() was given, also by an earlier run; empty when nothing."""
        try:
            return self._version_path.read_text(encoding="ascii")
        except (OSError, ValueError):
            return ""

    def remember(self, version: str) -> None:
        """Note what the server calls the version these bytes are of; nothing can be resumed without."""
        if not version or len(version) > _LONGEST_VERSION or not version.isascii():
            self._version_path.unlink(missing_ok=True)
        elif version != self.version:
            self._version_path.write_text(version, encoding="ascii")

    # ---- the end

    def hash_some(self) -> bool:
        """Hash a few more of the bytes there, in their order; False when there was nothing to do."""
        if self._sha256 is None:
            return False
        with self._lock:
            self._file.seek(self._hashed)
            chunk = self._file.read(min(CHUNK_BYTES, self._in_order() - self._hashed))
            self._hashed += len(chunk)
            digest = self._digest
        digest.update(chunk)  # others may write meanwhile
        return bool(chunk)

    def _in_order(self) -> int:
        """Bytes from the file's beginning on without a gap."""
        for piece in self._pieces:
            if not piece.whole:
                return piece.position
        return self._pieces[-1].position

    def install(self) -> None:
        """Verify the bytes and move them to the target; hash_some() has nothing left to do.

        Raises:
            WrongBytesError: they are deleted when the block ends.
        """
        if self._size is not None and self.arrived != self._size:
            raise WrongBytesError(f"{self.arrived} bytes arrived, {self._size} were promised")
        if self._sha256 not in (None, self._digest.hexdigest()):
            raise WrongBytesError(f"their sha256 is {self._digest.hexdigest()}, it should be {self._sha256}")
        os.fsync(self._file.fileno())
        self._close()
        # The notes go first: without them a whole part is still read as a whole part.
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
    """How many bytes of each piece are there: a header, then one 32-bit count a piece.

    A count is four aligned bytes, so that no kill can leave half of one.
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
        """Remove a part's map, if it has one."""
        cls._path(part).unlink(missing_ok=True)

    def read(self) -> list[int] | None:
        """The counts, none larger than what the part can hold; None when there is no map of this file."""
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
        """The pieces as an earlier run has left them, and the map ready for notes.

        Args:
            length: of the part; without a map all its bytes are there.
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
        """So many bytes of a piece are there."""
        if self._file:
            self._file.seek(self._HEADER.size + index * self._COUNT.size)
            self._file.write(self._COUNT.pack(count))

    def close(self) -> None:
        """No more notes."""
        if self._file:
            self._file.close()

    def _starts(self) -> range:
        return range(0, self.size, self.piece_bytes)

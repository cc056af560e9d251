"""tokenizer.model: the pieces of a SentencePiece vocabulary, read from its protobuf without that library.

Owns as much of the wire format and of sentencepiece_model.proto as is needed. The file is untrusted: lengths are
checked before they are used, and nothing recurses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from llmrun.errors import BadModelError, UsageError

MAX_PIECES = 1 << 20
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # the same numbers as in GGUF
_BPE = 2  # trainer_spec.model_type
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_SHOWN = "tokenizer.model"


@dataclass(frozen=True, slots=True)
class Piece:
    """A token: its text with ▁ for a space, its score (the higher, the earlier it is merged), its type."""

    text: bytes
    score: float
    type: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """A vocabulary, in the order of its ids, and whether a space is put before the text."""

    pieces: tuple[Piece, ...]
    adds_space: bool


def read_pieces(data: bytes) -> SentencePieceModel:
    """The vocabulary in the bytes of a tokenizer.model.

    Raises:
        BadModelError: it is damaged.
        UsageError: it is not a BPE vocabulary.
    """
    pieces: list[Piece] = []
    kind, adds_space = 1, True
    for number, value in _fields(data):
        if len(pieces) == MAX_PIECES and number == 1:
            raise _damaged(f"it has more than {MAX_PIECES:,} pieces")
        if number == 1 and isinstance(value, bytes):
            pieces.append(_piece(value, len(pieces)))
        elif number == 2 and isinstance(value, bytes):
            kind = _number_in(value, 3, kind)
        elif number == 3 and isinstance(value, bytes):
            adds_space = bool(_number_in(value, 3, 1))
    if not pieces:
        raise _damaged("it has 0 pieces")
    if kind != _BPE:
        raise UsageError(
            "the SentencePiece vocabulary is not a BPE vocabulary",
            why="a unigram model cuts words in another way than llama.cpp does in models of this architecture",
        )
    return SentencePieceModel(tuple(pieces), adds_space)


def _piece(data: bytes, number: int) -> Piece:
    text, score, kind = b"", 0.0, NORMAL
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            text = value
        elif field == 2 and isinstance(value, float):
            score = value
        elif field == 3 and isinstance(value, int):
            kind = value
    if not text or not isfinite(score) or not NORMAL <= kind <= BYTE:
        raise _damaged(f"piece {number} is {text[:40]!r} with the score {score} and the type {kind}")
    return Piece(text, score, kind)


def _number_in(data: bytes, wanted: int, default: int) -> int:
    """The last whole number of that field."""
    for field, value in _fields(data):
        if field == wanted and isinstance(value, int):
            default = value
    return default


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Number and value of each field of a message; what is 8 bytes long is skipped."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield number, value
        elif kind == _LENGTH:
            length, position = _varint(data, position)
            if length > len(data) - position:
                raise _damaged(f"field {number} is {length} bytes long, but {len(data) - position} are left")
            yield number, data[position : position + length]
            position += length
        elif kind == _FOUR_BYTES and position + 4 <= len(data):
            yield number, struct.unpack_from("<f", data, position)[0]
            position += 4
        elif kind == _EIGHT_BYTES and position + 8 <= len(data):
            position += 8
        else:
            raise _damaged(f"field {number} has the wire type {kind}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the lowest first, and the position after it."""
    value = 0
    for place in range(10):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, position
    raise _damaged("a number does not end")


def _damaged(why: str) -> BadModelError:
    return BadModelError(f"{_SHOWN} is damaged", why=why, hint="download it again; with git, run `git lfs pull`")

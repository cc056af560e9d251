"""Reader of tokenizer.model: the pieces of a SentencePiece vocabulary, parsed without the protobuf library.

The file is untrusted: lengths are checked before they are used, and nothing recurses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from llmrun.errors import BadModelError, UsageError

MAX_PIECES = 1 << 20
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # the same numbers as in GGUF
_UNIGRAM, _BPE = 1, 2  # trainer_spec.model_type
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_SHOWN = "tokenizer.model"


@dataclass(frozen=True, slots=True)
class Piece:
    """Token."""

    text: bytes  # with ▁ for a space
    score: float  # higher scores are merged earlier
    type: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """Vocabulary, and what is done to a text before."""

    pieces: tuple[Piece, ...]  # by id
    is_unigram: bool  # words are split by probabilities; otherwise by merges
    adds_space: bool  # a space is prepended to the text
    removes_spaces: bool  # those at both ends, and all but one of several
    charsmap: bytes  # rules of normalization; b"" without


def read_pieces(data: bytes) -> SentencePieceModel:
    """Parse the bytes of a tokenizer.model.

    Raises BadModelError if the file is damaged, and UsageError if llama.cpp does not split text in its way.
    """
    pieces: list[Piece] = []
    trainer, normalizer = b"", b""
    for number, value in _fields(data):
        if len(pieces) == MAX_PIECES and number == 1:
            raise _damaged(f"it has more than {MAX_PIECES:,} pieces")
        if number == 1 and isinstance(value, bytes):
            pieces.append(_piece(value, len(pieces)))
        elif number == 2 and isinstance(value, bytes):
            trainer += value  # as protobuf merges messages
        elif number == 3 and isinstance(value, bytes):
            normalizer += value
    if not pieces:
        raise _damaged("it has 0 pieces")
    kind = _number_in(trainer, 3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise _refused("it splits text into words or characters", "its model_type is neither BPE nor unigram")
    if _number_in(trainer, 24, 0):
        raise _refused("it puts spaces behind words", "treat_whitespace_as_suffix is set")
    if not _number_in(normalizer, 5, 1):
        raise _refused("it keeps spaces as they are", "escape_whitespaces is not set")
    return SentencePieceModel(
        tuple(pieces),
        is_unigram=kind == _UNIGRAM,
        adds_space=bool(_number_in(normalizer, 3, 1)),
        removes_spaces=bool(_number_in(normalizer, 4, 1)),
        charsmap=next((value for field, value in _fields(normalizer) if field == 2 and isinstance(value, bytes)), b""),
    )


def _refused(what: str, why: str) -> UsageError:
    return UsageError(f"the SentencePiece vocabulary can't be converted: {what}", why=why)


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


def _number_in(data: bytes, number: int, default: int) -> int:
    for field, value in _fields(data):
        if field == number and isinstance(value, int):
            default = value
    return default


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield number and value of each field of a message, except fields of 8 bytes."""
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
    """Return a number of 7 bits per byte, the lowest first, and the position after it."""
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


def _damaged(reason: str) -> BadModelError:
    return BadModelError(f"{_SHOWN} is damaged", why=reason, hint="download it again; with git, run `git lfs pull`")

"""Native code passes over the strings of a vocabulary; a slow twin says where they end."""

from __future__ import annotations

import random
import struct

import pytest

from llmrun import _native


def twin(data: bytes, position: int, count: int) -> int:
    for _ in range(count):
        if position + 8 > len(data):
            return min(position + 8, 2**64 - 1)
        position = min(position + 8 + struct.unpack_from("<Q", data, position)[0], 2**64 - 1)
    return position


def test_strings_end_where_the_twin_says() -> None:
    numbers = random.Random(1)
    for _ in range(300):
        texts = [numbers.randbytes(numbers.choice((0, 1, 7, 300))) for _ in range(numbers.randrange(20))]
        data = bytearray(b"".join(struct.pack("<Q", len(text)) + text for text in texts))
        if data and numbers.random() < 0.5:  # damaged
            data[numbers.randrange(len(data))] = numbers.choice((0, 1, 255))
        whole = bytes(data[: numbers.randrange(len(data) + 1)])
        for position in (0, 5, len(whole)):
            for count in (0, 1, len(texts), len(texts) + 2):
                assert _native.skip_strings(whole, position, count) == twin(whole, position, count)


def test_a_length_that_overflows_is_beyond_all_files() -> None:
    data = struct.pack("<Q", 2**64 - 1) + b"more than eight bytes"
    assert _native.skip_strings(data, 0, 1) == _native.skip_strings(data, 0, 3) == 2**64 - 1


def test_what_has_no_bytes_is_refused() -> None:
    with pytest.raises(TypeError):
        _native.skip_strings("text", 0, 1)  # type: ignore[arg-type]

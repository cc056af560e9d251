"""Model files made to do harm: reader and pre-check end with our own errors, at once, and without much memory."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import pytest
from support.broken_headers import BROKEN
from support.effort import loop_seconds, loops
from support.gguf_writer import (
    ARRAY,
    RUNNABLE_VOCABULARY,
    STRING,
    TENSORS,
    TensorSpec,
    Typed,
    gguf,
    metadata,
    runnable_model,
    runnable_tensors,
    string,
    tiny_model,
    write,
)

from llmrun.errors import BadModelError, LlmrunError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import NeedMoreBytes, parse_header, read_header
from llmrun.gguf.rules import check, check_vocabulary

MUTATIONS = 8_000
MOST_LOOPS = 200  # about a second on an idle machine
MOST_BYTES = 48 << 20
HUGE = (2**31 - 1, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1)
NUMBER_TYPES = (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)
_HEAD = b"GGUF" + struct.pack("<I", 3)
_FACTS = [name for name, kind in vars(Header).items() if isinstance(kind, property | cached_property)]


def tell_everything(header: Header) -> None:
    """Ask for every figure and text, as `llmrun show` does."""
    for name in _FACTS:
        getattr(header, name)
    header.cache_bytes(4096, ubatch=512)
    header.special_token("eos")


def examine(path: Path) -> None:
    """All that happens before a file is given to llama.cpp, and what happens after a crash."""
    header = read_header(path)
    tell_everything(header)
    check(header)
    check_vocabulary(header)


# ---- made by hand


def _one_key(item: bytes, key: str = "k") -> bytes:
    return _HEAD + struct.pack("<QQ", 0, 1) + string(key) + item + bytes(64)


def _damaged_counts() -> Iterator[tuple[str, bytes]]:
    for number in (65_537, *HUGE):
        yield f"{number} tensors", _HEAD + struct.pack("<QQ", number, 0) + bytes(64)
        yield f"{number} keys", _HEAD + struct.pack("<QQ", 0, number) + bytes(64)
        yield f"key of {number} bytes", _HEAD + struct.pack("<QQQ", 0, 1, number) + bytes(64)
        yield f"text of {number} bytes", _one_key(struct.pack("<IQ", STRING, number))
        yield f"text in an array of {number} bytes", _one_key(struct.pack("<IIQQ", ARRAY, STRING, 1, number))
        yield f"array of {number} texts", _one_key(struct.pack("<IIQ", ARRAY, STRING, number))
        yield f"tensor name of {number} bytes", _HEAD + struct.pack("<QQQ", 1, 0, number) + bytes(64)
    for version in (0, 1, 4, 255, 2**16, 2**24, 3 << 24, 2**32 - 1):
        yield f"version {version:#x}", b"GGUF" + struct.pack("<IQQ", version, 0, 0)
    for magic in (b"GGUE", b"gguf", b"GGML", b"FUGG", b"\0\0\0\0"):
        yield f"magic {magic!r}", magic + tiny_model()[4:]


def _damaged_values() -> Iterator[tuple[str, bytes]]:
    for kind in NUMBER_TYPES:
        for number in HUGE:
            yield f"array of {number} of type {kind}", _one_key(struct.pack("<IIQ", ARRAY, kind, number))
        yield (
            f"value of type {kind} cut off",
            (_HEAD + struct.pack("<QQ", 0, 1) + string("k") + struct.pack("<I", kind)),
        )
    for kind in (13, 14, 99, 255, 2**16, 2**31, 2**32 - 1):
        yield f"value of type {kind}", _one_key(struct.pack("<I", kind))
        yield f"array of type {kind}", _one_key(struct.pack("<IIQ", ARRAY, kind, 1))
    for depth in (1, 2, 5000):
        yield f"{depth} arrays in an array", _one_key(struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * depth)
    for alignment in (0, 3, 48, 2**31 + 1, 2**32 - 1):
        yield f"alignment {alignment}", gguf({"general.alignment": alignment}, TENSORS)
    for kind in (0, 5, 10):
        yield f"alignment of type {kind}", gguf({"general.alignment": Typed(kind, 32)}, TENSORS)
    for key in ("split.no", "split.count"):
        yield f"{key} of another type", tiny_model({key: 1})


def _damaged_tensors() -> Iterator[tuple[str, bytes]]:
    for kind in (4, 5, 31, 32, 33, 36, 37, 38, 43, 44, 255, 2**31, 2**32 - 1):
        yield f"tensor of type {kind}", gguf({}, [TensorSpec("w", (256,), kind, 1024)])
    for count in (5, 8, 255):
        yield f"{count} dimensions", gguf({}, [TensorSpec("w", (1,) * count, 0, 4)])
    for size in HUGE:
        yield f"{size} columns", gguf({}, [TensorSpec("w", (size,), 0, 64)])
        yield f"{size} rows", gguf({}, [TensorSpec("w", (32, size), 2, 64)])
        yield f"{size} x {size}", gguf({}, [TensorSpec("w", (size, size, size, size), 0, 64)])
        yield f"offset {size}", gguf({}, [TensorSpec("w", (8,), 0, 32, offset=size)])
    for columns in (1, 31, 33, 255):
        yield f"rows of {columns} blocks", gguf({}, [TensorSpec("w", (columns, 2), 12, 1024)])
    overlapping = [TensorSpec("a", (8,), 0, 32), TensorSpec("b", (8,), 0, 32, offset=0)]
    yield "overlapping tensors", gguf({}, overlapping)
    yield "a gap between tensors", gguf({}, [TensorSpec("a", (8,), 0, 32), TensorSpec("b", (8,), 0, 32, offset=64)])
    yield "the same tensor twice", gguf({}, [TensorSpec("a", (8,), 0, 32)] * 2)
    for missing in (1, 16, 1000, 5000):
        yield f"{missing} bytes missing", tiny_model()[:-missing]


def _damaged_vocabularies() -> Iterator[tuple[str, bytes]]:
    for number in (3, 100, 258):
        without = list(RUNNABLE_VOCABULARY)
        without[number] = "something else"
        yield f"no byte token {number - 3}", runnable_model({"tokenizer.ggml.tokens": without})
        twice = list(RUNNABLE_VOCABULARY)
        twice[number] = "<s>"
        yield f"token {number} is another one's", runnable_model({"tokenizer.ggml.tokens": twice})
    yield "a vocabulary of numbers", runnable_model({"tokenizer.ggml.tokens": [1.0] * 261})


def refused(path: Path) -> BadModelError:
    """Why."""
    with pytest.raises(BadModelError) as caught:
        examine(path)
    return caught.value


def made_by_hand() -> dict[str, bytes]:
    found = {f"rule: {name}": tiny_model(changes) for name, (changes, _) in BROKEN.items()}
    for makers in (_damaged_counts, _damaged_values, _damaged_tensors, _damaged_vocabularies):
        found.update(makers())
    return found


HAND_MADE = made_by_hand()


def test_there_are_enough() -> None:
    assert len(HAND_MADE) >= 200


@pytest.mark.parametrize("name", HAND_MADE)
def test_refused_at_once(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "bad.gguf", HAND_MADE[name])
    assert loops(lambda: refused(path)) < MOST_LOOPS
    error = refused(path)
    assert error.why
    assert f"{error.what}{error.why}{error.hint}".isprintable()


# ---- large files, which cost their maker nothing: what is not written is zeros


def large(path: Path, content: bytes, size: int) -> Path:
    with path.open("wb") as file:
        file.write(content)
        file.truncate(size)
    return path


_MANY = struct.pack("<IIQ", ARRAY, STRING, 4 << 20)
LARGE: dict[str, tuple[bytes, int]] = {
    "a trillion tensors": (_HEAD + struct.pack("<QQ", 2**40, 0), 1 << 40),
    "65,536 tensors without a name": (_HEAD + struct.pack("<QQ", 65_536, 0), 1 << 40),
    "65,536 keys without a name": (_HEAD + struct.pack("<QQ", 0, 65_536), 1 << 40),
    "a text of 200 MB": (_one_key(struct.pack("<IQ", STRING, 200 << 20)), 1 << 30),
    "a text of 2 GB": (_one_key(struct.pack("<IQ", STRING, 2 << 30)), 1 << 40),
    "an array of 200 MB": (_one_key(struct.pack("<IIQ", ARRAY, 0, 200 << 20)), 1 << 30),
    "a terabyte of numbers": (_one_key(struct.pack("<IIQ", ARRAY, 12, 2**37)), 1 << 40),
    "four million empty texts": (_one_key(_MANY), 1 << 30),
    "four million empty tokens": (_one_key(_MANY, "tokenizer.ggml.tokens"), 1 << 30),
    "five million empty texts": (_one_key(struct.pack("<IIQ", ARRAY, STRING, 5_000_000)), 1 << 30),
    "a tensor of a petabyte": (gguf(metadata(), [TensorSpec("w", (2**24, 2**24), 0, 0)]), 1 << 40),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_files_take_neither_time_nor_memory(tmp_path: Path, name: str) -> None:
    content, size = LARGE[name]
    try:
        path = large(tmp_path / "large.gguf", content, size)
    except OSError:
        pytest.skip("this file system has no room for sparse files")
    assert loops(lambda: refused(path)) < 2 * MOST_LOOPS
    if "million" in name:  # tracing takes seconds then, and what is kept of them is a place for every 1,024th
        return
    tracemalloc.start()
    try:
        refused(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


# ---- mutations

_BOUNDARIES = (0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 511, 512, 513, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1,
               2**63, 2**64 - 1)  # fmt: skip


def mutated(whole: bytes, header_end: int, source: random.Random) -> bytes:
    """Some bytes of the header changed, replaced by a boundary, cut out, put in, or copied from elsewhere."""
    data = bytearray(whole)
    for _ in range(source.choice((1, 1, 1, 2, 4))):
        place, width = source.randrange(4, header_end), source.choice((1, 2, 4, 8))
        way = source.randrange(6)
        if way == 0:
            data[place % len(data)] ^= 1 << source.randrange(8)
        elif way == 1:
            number = source.choice(_BOUNDARIES) % (1 << 8 * width)
            data[place : place + width] = number.to_bytes(width, "little")
        elif way == 2:
            del data[place : place + source.choice((1, 4, 8, 32))]
        elif way == 3:
            data[place:place] = source.randbytes(width)
        elif way == 4:
            other = source.randrange(4, header_end)
            data[place : place + width] = data[other : other + width]
        else:
            data[place : place + width] = source.randbytes(width)
    return bytes(data) if source.random() < 0.95 else bytes(data[: source.randrange(len(data))])


@pytest.mark.parametrize("base", ["tiny", "runnable"])
def test_mutations_raise_only_our_errors(tmp_path: Path, base: str) -> None:
    whole = tiny_model() if base == "tiny" else runnable_model()
    tensors = TENSORS if base == "tiny" else runnable_tensors()
    end = len(whole) - sum(-(-tensor.n_bytes // 32) * 32 for tensor in tensors)
    source = random.Random(base)
    path = tmp_path / "mutated.gguf"
    failed = passed = 0
    slowest = 0.0
    messages: set[str] = set()
    for _ in range(MUTATIONS // 2):
        data = mutated(whole, end, source)
        start = time.process_time()
        try:
            header = parse_header(data, len(data), path)
            tell_everything(header)
            check(header)
            examine(write(path, data))
            passed += 1
        except LlmrunError as error:
            failed += 1
            messages.add(str(error))
        slowest = max(slowest, time.process_time() - start)
    assert slowest < MOST_LOOPS * loop_seconds()
    assert failed > 500
    assert passed > 100
    assert all(map(str.isprintable, messages))


def test_mutations_need_little_memory(tmp_path: Path) -> None:
    whole = runnable_model()
    source = random.Random(3)
    tracemalloc.start()
    try:
        for _ in range(500):
            data = mutated(whole, 8000, source)
            with suppress(LlmrunError):
                check(parse_header(data, len(data), tmp_path / "mutated.gguf"))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_pieces_of_mutations_raise_only_our_errors_or_ask_for_more(tmp_path: Path) -> None:
    whole = tiny_model()
    source = random.Random(4)
    for _ in range(2000):
        data = mutated(whole, 1000, source)
        known = source.randrange(len(data) + 1)
        try:
            parse_header(data[:known], len(data), tmp_path / "mutated.gguf")
        except NeedMoreBytes as more:
            asked = more.until
        except LlmrunError:
            continue
        else:
            continue
        assert known < asked <= len(data)

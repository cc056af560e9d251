"""The engine's side of quantizing without llama.cpp: what its log means, and importance matrices."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_writer import string, tiny_model, value, write

from llmrun.engine.jobs.quantize.imatrix import read_imatrix
from llmrun.engine.jobs.quantize.quantize import _Log
from llmrun.errors import BadModelError, ModelNotFoundError, UsageError

# As llama.cpp writes them, with their long lines.
# ruff: noqa: E501, W291
PLANNED = """\
llama_model_loader: loaded meta data with 36 key-value pairs
warning: blk.0.attn_k.weight                  - ncols    576 not divisible by 256 (required for type    q4_K) -> falling back to    q5_0
[   1/   4] token_embd.weight                    - [   576,  49152,      1,      1], type =    f16, size =    54.00 MiB ->    28.69 MiB (q8_0)
[   2/   4] blk.0.attn_k.weight                  - [   576,    192,      1,      1], type =    f16, size =     0.21 MiB ->     0.07 MiB (q5_0)
[   3/   4] blk.0.attn_norm.weight               - [   576,      1,      1,      1], type =    f32, size =    0.002 MiB
[   4/   4] a.very.long.name.that.leaves.no.room.for.padding.at.all.weight - [   576,    192,      1,      1], type =   bf16, size =     0.21 MiB ->     0.12 MiB (q8_0)
llama_model_quantize_impl: WARNING: dry run completed successfully, but actually completing this quantization will require an imatrix!
llama_model_quantize_impl: WARNING: 1 of 4 tensor(s) required fallback quantization
"""
WRITTEN = """\
[   1/   4] token_embd.weight                    - [   576,  49152,      1,      1], type =    f16, 
====== llama_model_quantize_impl: did not find weights for token_embd.weight
converting to q8_0 .. size =    54.00 MiB ->    28.69 MiB
[   2/   4] blk.0.attn_k.weight                  - [   576,    192,      1,      1], type =    f16, converting to q5_0 .. size =     0.21 MiB ->     0.07 MiB
[   3/   4] blk.0.attn_norm.weight               - [   576,      1,      1,      1], type =    f32, size =    0.002 MiB
[   4/   4] a.very.long.name.that.leaves.no.room.for.padding.at.all.weight - [   576,    192,      1,      1], type =   bf16, converting to q8_0 .. """
LAST = "size =     0.21 MiB ->     0.12 MiB\n"
TYPES = {
    "token_embd.weight": "Q8_0",
    "blk.0.attn_k.weight": "Q5_0",
    "blk.0.attn_norm.weight": "F32",
    "a.very.long.name.that.leaves.no.room.for.padding.at.all.weight": "Q8_0",
}


def heard(text: str, size: int = 7) -> _Log:
    """The log, in pieces of so many characters."""
    log = _Log()
    for start in range(0, len(text), size):
        log.add(text[start : start + size])
    return log


@pytest.mark.parametrize("size", [1, 13, 100_000])
def test_a_plan(size: int) -> None:
    log = heard(PLANNED, size)
    assert log.types == TYPES
    assert list(log.types) == list(TYPES)
    assert log.wanted == {"blk.0.attn_k.weight": "Q4_K"}
    assert log.needs_imatrix
    assert log.error == ""


def test_a_file_being_written() -> None:
    log = heard(WRITTEN)
    assert log.done == 3
    log.add(LAST)
    assert log.done == 4
    assert log.types == TYPES
    assert log.unimportant == ["token_embd.weight"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "llama_model_quantize: failed to quantize: basic_ios::clear: iostream error",
            "basic_ios::clear: iostream error",
        ),
        (
            "llama_model_load: error loading model: missing tensor 'x'",
            "llama_model_load: error loading model: missing tensor 'x'",
        ),
    ],
)
def test_what_was_wrong(line: str, why: str) -> None:
    assert heard(line + "\n").error == why


def test_the_first_error_is_the_cause() -> None:
    log = heard("error loading model: cause\nerror: consequence\n")
    assert log.error == "error loading model: cause"


# ---- importance matrices ---------------------------------------------------------------------------


def imatrix(entries: dict[str, Any]) -> bytes:
    """A file as llama-imatrix writes it: name -> numbers of one or two dimensions."""
    arrays = {name: np.asarray(values, np.float32) for name, values in entries.items()}
    keys = {"general.type": "imatrix", "imatrix.datasets": ["some text"], "imatrix.chunk_count": 7}
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(keys)))
    for key, item in keys.items():
        out += string(key) + value(item)
    offset = 0
    for name, array in arrays.items():
        shape = array.shape[::-1]
        out += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", 0, offset)
        offset += -(-array.nbytes // 32) * 32
    out += b"\0" * (-len(out) % 32)
    for array in arrays.values():
        out += array.tobytes() + b"\0" * (-array.nbytes % 32)
    return bytes(out)


def test_sums_are_divided_by_counts(tmp_path: Path) -> None:
    entries = {
        "a.in_sum2": [[2.0, 4.0, 6.0]],
        "a.counts": [[2.0]],
        "b_exps.in_sum2": [[1.0, 2.0], [5.0, 5.0], [9.0, 3.0]],
        "b_exps.counts": [[1.0], [0.0], [3.0]],
    }
    found = read_imatrix(write(tmp_path / "i.gguf", imatrix(entries)))
    assert (found.dataset, found.n_chunks) == ("some text", 7)
    assert found.weights["a"].tolist() == [1.0, 2.0, 3.0]
    assert found.weights["b_exps"].tolist() == [1.0, 2.0, 1.0, 1.0, 3.0, 1.0]  # an expert that was never used counts 1
    assert found.weights["a"].dtype == np.float32


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"a.in_sum2": [[1.0]]}, "a has no counts"),
        ({"a.in_sum2": [[1.0, 2.0, 3.0]], "a.counts": [[1.0], [1.0]]}, "3 sums for 2 counts"),
        ({"a.in_sum2": [[1.0, np.nan]], "a.counts": [[1.0]]}, "not finite"),
        ({"a.in_sum2": [[1.0, np.inf]], "a.counts": [[1.0]]}, "not finite"),
    ],
)
def test_damaged_ones(tmp_path: Path, entries: dict[str, Any], why: str) -> None:
    with pytest.raises(BadModelError) as error:
        read_imatrix(write(tmp_path / "i.gguf", imatrix(entries)))
    assert why in str(error.value)


@pytest.mark.parametrize("content", [tiny_model(), b"\x01\0\0\0old format" * 10, b""])
def test_what_is_none(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UsageError, match="is not an importance matrix"):
        read_imatrix(write(tmp_path / "i.gguf", content))


def test_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        read_imatrix(tmp_path / "i.gguf")

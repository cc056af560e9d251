"""The engine's side of quantizing without llama.cpp: what its log means."""

from __future__ import annotations

import pytest

from llmrun.engine.jobs.quantize import _Log

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
    """Return the log in pieces of n characters."""
    log = _Log()
    for start in range(0, len(text), size):
        log.add(text[start : start + size])
    return log


@pytest.mark.parametrize("size", [1, 13, 100_000])
def test_a_plan(size: int) -> None:
    log = heard(PLANNED, size)
    assert log.types == TYPES
    assert list(log.types) == list(TYPES)
    assert log.requested == {"blk.0.attn_k.weight": "Q4_K"}
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

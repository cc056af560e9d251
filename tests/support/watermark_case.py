"""Texts of a made-up model that carry watermarks: the same rows of logits for transformers and for us."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmrun import _native
from llmrun.protocol.watermark import Watermark, read_watermark

GOLDENS = Path(__file__).parents[1] / "native/watermark_goldens.json"
N_VOCAB = 300


class Case(NamedTuple):
    """A watermark, its key, and what stands before the answer."""

    watermark: Watermark
    key: str
    prompt: tuple[int, ...] = (5, 17, 33, 8)


CASES = {
    "lefthash": Case(read_watermark("green"), "15485863"),
    "half": Case(read_watermark("green,gamma=0.5,bias=4"), str(2**62 + 12345)),
    "selfhash": Case(read_watermark("green,selfhash=1"), "15485863"),
    "selfhash of 4": Case(read_watermark("green,selfhash=4"), "a long secret"),
}


def logits_of(step: int) -> np.ndarray[Any, Any]:
    """A step's row, no two logits alike; the model says nothing of its own."""
    order = (np.arange(N_VOCAB) * 37 + step * 101) % N_VOCAB
    return (order * 0.0317).astype(np.float32)


def our_text(case: Case, length: int, **params: Any) -> list[int]:
    """The tokens that the native sampler makes of these rows; greedy where nothing else is said."""
    sampler = our_sampler(case, **params)
    text = []
    for step in range(length):
        row = logits_of(step)
        text.append(sampler.sample(row.ctypes.data, accept=True))
    return text


def our_sampler(case: Case, **params: Any) -> _native.Sampler:
    values = {"temperature": 0.0, "watermark": case.watermark.native(case.key), **params}
    sampler = _native.Sampler(N_VOCAB, **values)
    sampler.accept_many(case.prompt)
    return sampler


def digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()[:16]

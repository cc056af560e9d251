"""A model that is all noise, yet the same noise whenever it sees the same tokens."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

from support.fake_context import N_VOCAB

TEXT = "".join(f"{number} squared is {number * number}, " for number in range(60))


def noisy(seed: int, scale: float = 3.0) -> Callable[[Sequence[int]], list[float]]:
    """A model whose logits depend on all tokens before."""

    def logits(tokens: Sequence[int]) -> list[float]:
        seen = zlib.crc32(repr(tokens).encode(), seed)
        return [scale * zlib.crc32(bytes((token % 256,)), seen) / 2**32 for token in range(N_VOCAB)]

    return logits


def nll_of(model: Callable[[Sequence[int]], Sequence[float]], tokens: Sequence[int], token: int) -> float:
    """The negative log-likelihood of a token behind others."""
    logits = model(tokens)
    return math.log(math.fsum(map(math.exp, logits))) - logits[token]

"""Watermark detection: the number of tokens that follow a key, and the probability of that number by chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from llmrun.protocol.watermark import Watermark

ENOUGH_TOKENS = 200  # Number of scored tokens above which a negative result most likely means no watermark


class WatermarkFinding(NamedTuple):
    """The result of the test of one key on one text."""

    tokens: int  # of the text
    judged: int  # tokens that were scored: without those of unknown context and without repetitions
    hits: int  # scored tokens that follow the key
    expected: float  # share of hits without a watermark
    z: float  # standard deviations of the hits above the expected number
    p: float  # probability of as many hits without a watermark


def find_watermark(
    watermark: Watermark, key: str, n_vocab: int, tokens: Sequence[int], *, repeats: bool = False
) -> WatermarkFinding:
    """Test a text for a key's watermark.

    Args:
        n_vocab: size of the model's vocabulary, on which the green tokens depend.
        tokens: of the answer without its prompt, which only dilutes the watermark.
        repeats: count repeated n-grams too, as transformers' detector does. Repetition is no new evidence and makes
            texts without a watermark look marked.

    Raises:
        UsageError: the key can't be used.
    """
    judged, hits = watermark.native(key).count(n_vocab, tokens, repeats)
    chance = watermark.gamma
    z = (hits - chance * judged) / math.sqrt(judged * chance * (1 - chance)) if judged else 0.0
    return WatermarkFinding(len(tokens), judged, hits, chance, z, math.erfc(z / math.sqrt(2)) / 2)

"""Whether a text carries a watermark: how often it did what a key wants, and how likely that is by chance.

Owns the test; the native part counts, and must not print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from llmrun.protocol.watermark import Watermark

ENOUGH_TOKENS = 200
"""Judged tokens from which a text without a finding most likely has no mark."""
_CHANCE_FOR_SYNTHID = 0.5


class WatermarkFinding(NamedTuple):
    """What a text tells about a key.

    Attributes:
        tokens: of the text.
        judged: of these, that could be: not those whose context is not known, nor repetitions.
        trials: one for each judged token; for synthid one for each and each round.
        hits: trials that went as the key wants.
        expected: share of hits without a watermark.
        z: how many standard deviations the hits are over what is expected.
        p: how likely as many hits are without a watermark.
    """

    tokens: int
    judged: int
    trials: int
    hits: int
    expected: float
    z: float
    p: float


def find_watermark(
    watermark: Watermark, key: str, n_vocab: int, tokens: Sequence[int], *, repeats: bool = False
) -> WatermarkFinding:
    """Look for a key's mark.

    Args:
        n_vocab: of the model, which decides which tokens are green.
        tokens: of the answer alone; a prompt before it only hides the mark.
        repeats: count repeated n-grams, too, as transformers' detector does. Repetition is no new evidence, and texts
            without a mark look marked by it.

    Raises:
        UsageError: the key can't be used.
    """
    judged, trials, hits = watermark.native(key).count(n_vocab, tokens, repeats)
    chance = watermark.gamma if watermark.scheme == "green" else _CHANCE_FOR_SYNTHID
    z = (hits - chance * trials) / math.sqrt(trials * chance * (1 - chance)) if trials else 0.0
    return WatermarkFinding(len(tokens), judged, trials, hits, chance, z, math.erfc(z / math.sqrt(2)) / 2)

"""Whether draws come from a distribution."""

from __future__ import annotations

import math
from collections import Counter


def chi_square_limit(freedom: int) -> float:
    """Exceeded by chance once in 1,000 times (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def assert_drawn_from(expected: dict[int, float], draws: list[int]) -> None:
    counts = Counter(draws)
    assert set(counts) <= set(expected)
    # What is expected fewer than 10 times is counted together.
    likely = [token for token, p in expected.items() if p * len(draws) >= 10]
    rest = 1 - sum(expected[token] for token in likely)
    cells = [(counts[token], expected[token] * len(draws)) for token in likely]
    cells.append((len(draws) - sum(found for found, _ in cells), rest * len(draws)))
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in cells if wanted > 1e-6)
    assert statistic < chi_square_limit(max(1, len(likely) - 1))

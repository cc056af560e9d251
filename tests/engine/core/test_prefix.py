"""Which cached tokens a prompt can reuse."""

from __future__ import annotations

import random

import pytest

from llmrun.engine.core.prefix import common_prefix, reusable


@pytest.mark.parametrize(
    ("cached", "prompt", "common", "reused"),
    [
        ([], [1], 0, 0),
        ([1], [1], 1, 0),
        ([1, 2], [1], 1, 0),
        ([1], [1, 2], 1, 1),
        ([1, 2, 3], [1, 2, 3], 3, 2),
        ([1, 2, 3, 4], [1, 2, 3], 3, 2),
        ([1, 2, 3], [1, 2, 3, 4], 3, 3),
        ([1, 9, 3], [1, 2, 3], 1, 1),
        ([9, 2, 3], [1, 2, 3], 0, 0),
        ([1, 2, 9, 4, 5], [1, 2, 3, 4, 5], 2, 2),
    ],
)
def test_table(cached: list[int], prompt: list[int], common: int, reused: int) -> None:
    assert common_prefix(cached, prompt) == common
    assert reusable(cached, prompt) == reused


def test_random_sequences_against_the_obvious_loop() -> None:
    rng = random.Random(3)
    for _ in range(1000):
        first, second = ([rng.randrange(2) for _ in range(rng.randrange(1, 9))] for _ in range(2))
        obvious = 0
        while obvious < min(len(first), len(second)) and first[obvious] == second[obvious]:
            obvious += 1
        assert common_prefix(first, second) == obvious
        assert reusable(first, second) == min(obvious, len(second) - 1)

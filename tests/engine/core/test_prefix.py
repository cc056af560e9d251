"""Which cached tokens a prompt can reuse."""

from __future__ import annotations

import random
from array import array
from functools import partial
from itertools import takewhile

import pytest

from llmrun.engine.core.prefix import Checkpoint, Prefix, Salt, common_prefix, longest, reusable


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


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_prefix_is_that_of_the_obvious_loop(seed: int) -> None:
    """Of slots and states, whose tokens are lists, and of files, whose tokens are arrays."""
    rng = random.Random(seed)

    def tokens() -> list[int]:
        return [1] * rng.randint(0, 6) + rng.choices((1, 2), k=rng.randint(0, 6))

    salts, prompt = (Salt("one"), Salt("two")), tokens()
    found = [
        Prefix(array("i", each) if rng.random() < 0.5 else each, rng.choice(salts))
        for each in (tokens() for _ in range(30))
    ]
    for prefix in found:
        lengths = sorted(rng.sample(range(len(prefix.tokens) + 1), k=min(2, len(prefix.tokens))))
        prefix.checkpoints = [Checkpoint(length, bytearray()) for length in lengths]
    for cuts in (True, False):

        def obvious(prefix: Prefix, cuts: bool = cuts) -> int:
            if prefix.salt != salts[0]:
                return 0
            length = sum(takewhile(bool, (a == b for a, b in zip(prefix.tokens, prompt, strict=False))))
            ends = [each.length for each in prefix.checkpoints if each.length <= length]
            return length if cuts or length == len(prefix.tokens) else max(ends, default=0)

        best, length = longest(found, prompt, salts[0], partial(Prefix.reach, cuts=cuts))
        assert (length, obvious(best) if length else 0) == (max(map(obvious, found)), length)
        equal = [len(each.tokens) for each in found if obvious(each) == length]
        assert not length or len(best.tokens) == min(equal)

"""How a batch is shared out between sequences."""

from __future__ import annotations

import random

import pytest

from llmrun.engine.core.scheduler import schedule


@pytest.mark.parametrize(
    ("waiting", "n_batch", "shares"),
    [
        ([], 8, []),
        ([0], 8, [0]),
        ([1], 8, [1]),
        ([20], 8, [8]),
        ([8], 8, [8]),
        ([20, 1], 8, [7, 1]),
        ([1, 20, 1], 8, [1, 6, 1]),
        ([5, 5, 5], 8, [5, 3, 0]),
        ([20, 20, 1, 1], 2, [0, 0, 1, 1]),
        ([1, 1, 1], 2, [1, 1, 0]),
    ],
)
def test_table(waiting: list[int], n_batch: int, shares: list[int]) -> None:
    assert schedule(waiting, n_batch) == shares


def test_random_loads() -> None:
    rng = random.Random(4)
    for _ in range(1000):
        n_batch = rng.randint(1, 12)
        waiting = [rng.choice([0, 1, 1, rng.randrange(30)]) for _ in range(rng.randrange(8))]
        shares = schedule(waiting, n_batch)
        assert all(0 <= share <= want for share, want in zip(shares, waiting, strict=True))
        assert sum(shares) == min(sum(waiting), n_batch)
        decoding = sum(want == 1 for want in waiting)
        got = sum(share for share, want in zip(shares, waiting, strict=True) if want == 1)
        assert got == min(decoding, n_batch), "sequences that decode go first"


def test_every_sequence_gets_through() -> None:
    """While anything waits, batch by batch, everything is computed, in as few batches as can be."""
    rng = random.Random(5)
    for _ in range(200):
        n_batch = rng.randint(1, 12)
        waiting = [rng.randrange(40) for _ in range(rng.randint(1, 6))]
        batches = 0
        total = sum(waiting)
        while any(waiting):
            waiting = [want - share for want, share in zip(waiting, schedule(waiting, n_batch), strict=True)]
            batches += 1
        assert batches == -(-total // n_batch)

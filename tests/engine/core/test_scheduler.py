"""The shares of sequences in a batch."""

from __future__ import annotations

import random

import pytest

from llmrun.engine.core.metrics import PrefillRate
from llmrun.engine.core.policy import POLICY
from llmrun.engine.core.scheduler import budget, level, mixed_tokens, schedule


@pytest.mark.parametrize(
    ("waiting", "n_batch", "shares"),
    [
        ([], 100, []),
        ([0], 100, [0]),
        ([1], 100, [1]),
        ([200], 100, [100]),
        ([100], 100, [100]),
        ([200, 1], 100, [49, 1]),
        ([1, 200, 1], 100, [1, 48, 1]),
        ([3, 200, 1], 100, [3, 46, 1]),
        ([50, 50, 50], 100, [50, 50, 0]),
        ([200, 20, 1], 20, [19, 0, 1]),
        ([200, 20], 100, [80, 20]),
        ([200, 90, 30], 100, [50, 20, 30]),
        ([90, 90, 90], 100, [90, 10, 0]),
        ([90, 200, 200], 101, [90, 11, 0]),
        ([200, *[1] * 40], 100, [10, *[1] * 40]),
        ([20, 20, 1, 1], 2, [0, 0, 1, 1]),
        ([1, 1, 1], 2, [1, 1, 0]),
    ],
)
def test_table(waiting: list[int], n_batch: int, shares: list[int]) -> None:
    assert schedule(waiting, n_batch, 50) == shares


def test_where_half_is_too_little_for_a_piece_they_take_turns() -> None:
    assert schedule([300, 200, 1], 512, 100) == [99, 0, 1]
    assert schedule([300, 200, 1], 512, 100, turn=1) == [0, 99, 1], "who needs least has every other turn"
    assert schedule([300, 200, 1], 512, 200) == schedule([300, 200, 1], 512, 200, turn=1) == [100, 99, 1]
    assert schedule([300, 200], 100, 100, turn=1) == [50, 50], "nobody waits for this batch"


def test_a_batch_is_as_large_as_is_worthwhile_where_that_is_no_long_pause() -> None:
    rate = PrefillRate()
    rate.record(500, 1.0)
    assert mixed_tokens(rate, [5000]) == 48
    assert mixed_tokens(rate, [5000], POLICY.piece) == POLICY.piece
    assert mixed_tokens(rate, [5000], 200) == 48, "that would be a pause of 0.4 seconds"
    assert mixed_tokens(rate, [119, 1], POLICY.piece) == 120, "all is over soon"


def test_few_sequences_decode_in_long_steps_beside_a_short_prompt() -> None:
    """Each step reads all weights for the few of them; a long prompt would delay them for long."""
    rate = PrefillRate()
    rate.record(500, 1.0)
    short, long = 48, 120
    for n_decoding, size in ((0, long), (1, long), (3, long), (4, short), (7, short)):
        assert mixed_tokens(rate, [490, 490, *[1] * n_decoding]) == size
    assert mixed_tokens(rate, [600, *[1] * 3]) == short
    rate.record(2000, 1.0)
    assert mixed_tokens(rate, [600, *[1] * 3]) > long, "on a faster machine it is short"


def test_the_next_prompt_does_not_begin_with_a_short_piece() -> None:
    """It would be a pass of its own, as slow as a piece of 64 tokens."""
    assert level([74, 28, 1], [74, 500, 1]) == [74, 0, 1]
    assert level([74, 28, 1], [500, 28, 1]) == [74, 28, 1], "this one ends"
    assert level([10, 60, 1], [10, 500, 1]) == [10, 60, 1], "the longest piece stays"
    assert level([1, 1, 1], [1, 1, 1]) == [1, 1, 1]
    assert level([], []) == []


def test_random_loads() -> None:
    rng = random.Random(4)
    for _ in range(1000):
        n_batch, n_mixed = rng.randint(1, 100), rng.randint(1, 60)
        waiting = [rng.choice([0, 1, 1, rng.randrange(30)]) for _ in range(rng.randrange(8))]
        shares = schedule(waiting, n_batch, n_mixed)
        most = n_batch if len(waiting) == 1 else budget(waiting, n_batch, n_mixed)
        assert all(0 <= share <= want for share, want in zip(shares, waiting, strict=True))
        assert sum(shares) == min(sum(waiting), most)
        decoding = sum(want == 1 for want in waiting)
        got = sum(share for share, want in zip(shares, waiting, strict=True) if want == 1)
        assert got == decoding or sum(waiting) > n_batch, "sequences that decode go first"


def test_every_sequence_gets_through() -> None:
    rng = random.Random(5)
    for _ in range(200):
        n_batch = rng.randint(1, 100)
        waiting = [rng.randrange(400) for _ in range(rng.randint(1, 6))]
        for _ in range(sum(waiting)):
            waiting = [want - share for want, share in zip(waiting, schedule(waiting, n_batch, 16), strict=True)]
        assert not any(waiting)


def test_while_no_request_decodes_a_batch_is_full() -> None:
    assert budget([300, 300], 512, 64) == 512
    assert budget([300, 1], 512, 64) == 64
    assert budget([300, *[1] * 100], 512, 64) == 108


@pytest.mark.parametrize(
    ("shares", "levelled"),
    [
        ([], []),
        ([1, 1, 1], [1, 1, 1]),
        ([1, 2, 3, 4], [1, 2, 2, 2]),
        ([41, 1, 38, 0, 39], [38, 1, 38, 0, 38]),
        ([48, 38, 47], [48, 38, 38]),
        ([100, 500, 130, 120, 600], [100, 500, 130, 100, 500]),
    ],
)
def test_pieces_of_nearly_one_length_are_cut_to_one(shares: list[int], levelled: list[int]) -> None:
    assert level(shares, shares) == levelled


def test_on_a_device_pieces_beside_decoding_are_measured_by_its_steps() -> None:
    rate = PrefillRate()
    rate.record(8000, 1.0)
    waiting = [1, 1, 1, 1, 30_000]
    assert mixed_tokens(rate, waiting, on_device=True) == mixed_tokens(rate, waiting) == 800
    rate.record(0, 0.005)
    assert mixed_tokens(rate, waiting, on_device=True) == 400
    assert mixed_tokens(rate, waiting) == 800
    slow = PrefillRate()
    slow.record(8000, 1.0)
    slow.record(0, 0.05)
    assert mixed_tokens(slow, waiting, on_device=True) == 800

"""Times of one sequence, from timestamps that the test makes up."""

from __future__ import annotations

import pytest

from llmrun.engine.core.metrics import Metrics, PrefillRate


def metrics(*token_times: float) -> Metrics:
    made = Metrics(arrived=10.0)
    for time in token_times:
        made.record_token(time)
    return made


def test_without_a_token() -> None:
    none = metrics()
    assert (none.ttft_seconds, none.decode_seconds, none.overhead_seconds, none.itl_quantile(0.5)) == (
        0,
        0,
        0,
        0,
    )


def test_with_one_token() -> None:
    one = metrics(12.5)
    assert (one.ttft_seconds, one.decode_seconds, one.overhead_seconds, one.itl_quantile(0.5)) == (
        2.5,
        0,
        0,
        0,
    )


def test_decode_runs_from_the_first_token_to_the_last() -> None:
    three = metrics(11.0, 12.0, 15.0)
    assert three.ttft_seconds == 1.0
    assert three.decode_seconds == 4.0


def test_decode_calls_before_the_first_token_are_prefill() -> None:
    made = Metrics(arrived=0.0)
    made.record_decode(0.5)
    made.record_decode(0.25)
    made.record_token(1.0)
    made.record_decode(0.125)
    made.record_token(2.0)
    assert made.prefill_seconds == 0.75
    assert made.model_seconds == 0.125
    assert made.overhead_seconds == 0.875


def test_overhead_is_per_token_and_never_negative() -> None:
    made = metrics(0.0, 1.0, 2.0, 3.0)
    made.record_decode(1.5)
    assert made.overhead_seconds == 0.5
    made.record_decode(99.0)
    assert made.overhead_seconds == 0.0


@pytest.mark.parametrize(
    ("gaps", "q", "quantile"),
    [
        ([7], 0.5, 7),
        ([7], 0.95, 7),
        ([1, 2], 0.5, 1),
        ([3, 1, 2], 0.5, 2),
        ([4, 3, 2, 1], 0.5, 2),
        ([5, 4, 3, 2, 1], 0.5, 3),
        (range(1, 21), 0.95, 19),
        (range(1, 22), 0.95, 20),
        (range(1, 101), 0.95, 95),
        (range(1, 101), 1.0, 100),
        (range(1, 101), 0.0, 1),
    ],
)
def test_quantile_is_the_nearest_rank(gaps: list[int], q: float, quantile: int) -> None:
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    assert metrics(*times).itl_quantile(q) == quantile


def test_how_many_tokens_go_through_in_a_time() -> None:
    rate = PrefillRate()
    assert rate.tokens_within(0.1) == 64, "nothing is known"
    rate.record(500, 1.0)
    assert rate.tokens_within(0.1) == 48
    rate.record(1500, 1.0)
    assert rate.tokens_within(0.1) == 96
    assert rate.tokens_within(1.0) == 1000
    rate.record(1, 10.0)
    rate.record(1, 0.0)
    assert rate.tokens_within(1e-9) == PrefillRate.MIN_TOKENS == 8

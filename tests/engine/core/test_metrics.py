"""Times of one sequence, from timestamps that the test makes up."""

from __future__ import annotations

import itertools

import pytest
from support.clock import Clock

from llmrun.engine.core.metrics import Metrics, PrefillRate, PreparationClock
from llmrun.engine.core.policy import POLICY


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
    ("gaps", "q", "expected"), [([7], 0.95, 7), ([4, 3, 2, 1], 0.5, 2.5), (range(1, 22), 0.95, 20)]
)
def test_quantiles_are_of_the_gaps_between_tokens(gaps: list[int], q: float, expected: float) -> None:
    assert metrics(*itertools.accumulate(gaps, initial=0.0)).itl_quantile(q) == expected


def test_how_many_tokens_go_through_in_a_time() -> None:
    rate = PrefillRate()
    assert rate.tokens_within(0.1) == 64, "nothing is known"
    rate.record(500, 1.0)
    assert rate.tokens_within(0.1) == 48
    rate.record(1500, 1.0)
    assert rate.tokens_within(0.1) == 96
    assert rate.tokens_within(1.0) == 1000
    rate.record(8, 80.0)
    rate.record(8, 80.0)
    assert rate.tokens_within(1e-9) == POLICY.few_tokens == 8


def test_decoding_sequences_do_not_lower_the_prefill_rate() -> None:
    rate = PrefillRate()
    rate.record(0, 0.5, n_decoding=2)
    rate.record(500, 1.5, n_decoding=2)
    assert rate.tokens_within(0.1) == 48
    rate = PrefillRate()
    rate.record(0, 9.0, n_decoding=2)
    rate.record(500, 2.0, n_decoding=2)
    assert rate.tokens_within(0.1) == 96, "a slow step takes at most three quarters of the time"


def test_a_part_of_a_preparation_inside_of_another_counts_for_itself_only() -> None:
    now = Clock(10.0)
    clock = PreparationClock(now)
    now.now = 100.0
    clock.start()
    now.now += 1
    with clock.phase("template"):
        now.now += 2
        with clock.phase("grammar"):
            now.now += 4
        now.now += 8
    now.now += 16
    assert clock.end(0.0) == Metrics(100.0, template_seconds=10.0, tokenize_seconds=17.0, grammar_seconds=4.0)
    clock.start()
    assert clock.end(90.0) == Metrics(90.0)
    assert clock.end(1000.0).arrived == now.now, "a request does not arrive after its preparation"


def test_the_queue_is_all_before_the_slot_but_the_preparation() -> None:
    waited = Metrics(arrived=10.0, template_seconds=1.0, grammar_seconds=2.0)
    assert waited.queue_seconds == 0.0
    waited.admitted = 18.0
    assert waited.queue_seconds == 5.0

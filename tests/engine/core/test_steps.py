"""The costs of decode steps, moved by what drafted steps take; flash attention on and off, compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.fake_context import FakeContext, endless

from llmrun.engine.core.steps import ATTENTION_CELLS, ON_DEVICE, ON_PROCESSOR, StepCosts, cost_of, measure_attention
from llmrun.engine.llama.base import CacheFull
from llmrun.protocol.speculation import AttentionTime

TABLE = ((1, 1.0), (4, 2.0), (8, 3.0))


def test_costs_between_the_widths_of_a_table_and_beyond() -> None:
    assert [cost_of(TABLE, width) for width in (1, 2, 4, 6, 8, 100)] == pytest.approx([1, 4 / 3, 2, 2.5, 3, 3])


@pytest.mark.parametrize("table", [ON_PROCESSOR, ON_DEVICE])
def test_wider_steps_of_a_table_cost_more_and_a_row_of_them_less(table: tuple[tuple[int, float], ...]) -> None:
    assert table[0] == (1, 1.0)
    assert sorted(table) == sorted(table, key=lambda row: row[1]) == sorted(table, key=lambda row: -row[1] / row[0])


@pytest.mark.parametrize("true", [0.5, 1.0, 2.0])
def test_what_drafted_steps_take_moves_the_whole_table(true: float) -> None:
    costs = StepCosts(TABLE)
    costs.record_plain([0.01] * 20)
    for _ in range(200):
        costs.record(cost_of(TABLE, 4) - 1, 0.01 * (1 + true))
    assert costs.factor == pytest.approx(true, rel=0.1)
    assert costs.table[2][1] == pytest.approx(1 + 2 * true, rel=0.1)
    assert costs.begin == TABLE


def test_one_interrupted_step_moves_little() -> None:
    costs = StepCosts(TABLE)
    costs.record_plain([0.01] * 20)
    for _ in range(30):
        costs.record(1.0, 0.02)
    costs.record(1.0, 10.0)
    assert costs.factor < 1.2


def test_costs_that_were_once_high_are_forgotten_by_plain_steps() -> None:
    """Else nothing would be drafted any more, and they would never be seen to be lower."""
    costs = StepCosts(TABLE)
    costs.record_plain([0.01] * 20)
    for _ in range(50):
        costs.record(1.0, 0.05)
    high = costs.factor
    assert high > 3
    for _ in range(100):
        costs.record_plain([0.01] * 64)
    assert costs.factor == pytest.approx(1.0, abs=0.01)


def test_without_a_plain_step_nothing_is_known() -> None:
    costs = StepCosts(TABLE)
    costs.record(1.0, 10.0)
    costs.record_plain([0.0])  # a clock too coarse
    costs.record(1.0, 10.0)
    assert costs.table == TABLE


# ---- flash attention on and off are compared in turns, at two depths


def contexts() -> tuple[FakeContext, FakeContext, Callable[[], float]]:
    """Two contexts, and a clock by which each row takes a second with flash attention, and two without."""
    on, off = (FakeContext(endless, n_ctx=ATTENTION_CELLS, n_batch=512) for _ in range(2))

    def clock() -> float:
        return float(sum(map(len, on.calls)) + 2 * sum(map(len, off.calls)))

    return on, off, clock


def test_two_depths_are_measured() -> None:
    on, off, clock = contexts()
    assert measure_attention(on, off, clock, lambda: False) == (AttentionTime(0, 1, 2), AttentionTime(64, 1, 2))


def test_a_fast_prefill_goes_deeper() -> None:
    on, off, clock = contexts()
    _, deep = measure_attention(on, off, lambda: clock() / 1e6, lambda: False)
    assert deep.depth == 1024


@pytest.mark.parametrize("calls", [0, 1, 20, 23, 30])
def test_an_interrupted_or_disturbed_measurement_is_none(calls: int) -> None:
    on, off, clock = contexts()
    assert measure_attention(on, off, clock, lambda: len(on.calls) + len(off.calls) == calls) == ()
    on, off, clock = contexts()
    off.faults[calls // 2] = CacheFull()
    assert measure_attention(on, off, clock, lambda: False) == ()


def test_a_busy_machine_gives_no_times_of_attention() -> None:
    on, off, clock = contexts()
    assert measure_attention(on, off, lambda: clock() ** 3, lambda: False) == ()

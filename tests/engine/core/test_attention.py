"""Flash attention on and off are compared in turns, at two depths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.fake_context import FakeContext, endless

from llmrun.engine.core.steps import ATTENTION_CELLS, measure_attention
from llmrun.engine.llama.base import CacheFull
from llmrun.protocol.speculation import AttentionTime


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


def test_a_busy_machine_gives_no_times() -> None:
    on, off, clock = contexts()
    assert measure_attention(on, off, lambda: clock() ** 3, lambda: False) == ()

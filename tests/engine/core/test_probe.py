"""Step times are measured within an answer, which is the one that the plain loop gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from support.conversation import Conversation
from support.fake_context import FakeContext, endless, hashed

from llmrun._native import StepShape
from llmrun.engine.core.steps import ATTENTION_CELLS, StepProbe, measure_attention
from llmrun.engine.llama.base import CacheFull
from llmrun.protocol.messages import Event, Finished, TextDelta
from llmrun.protocol.speculation import AttentionTime, StepsMeasured, StepTime


class StepClock:
    """A step takes a second, each row a sixteenth more, and a change of width a tenth."""

    def __init__(self, context: FakeContext) -> None:
        self._context = context

    def __call__(self) -> float:
        widths = [0, *map(len, self._context.calls)]
        changes = sum(before != after for before, after in itertools.pairwise(widths))
        return len(widths) + sum(widths) / 16 + changes / 10


def probed(
    most: int, probe: StepProbe | None = None, clock: type[StepClock] = StepClock, **context: int
) -> tuple[list[Event], Conversation]:
    talk = Conversation(hashed, n_ctx=1000, **context)
    talk.engine._clock = clock(talk.context)
    probe = probe or StepProbe()
    talk.ask("Hi", most=most, drafting=probe)
    talk.run()
    return talk.events, talk


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def test_step_times_come_before_the_end_of_the_same_answer() -> None:
    events, talk = probed(300)
    plain = Conversation(hashed, n_ctx=1000)
    plain.ask("Hi", most=300)
    plain.run()
    assert text_of(events) == text_of(plain.events)
    measured, finished = events[-2:]
    assert isinstance(finished, Finished)
    assert isinstance(measured, StepsMeasured)
    assert [time.width for time in measured.times] == [1, 2, 4, 8, 16]
    expected = [1 + 1 / 16, *(1 + width / 16 + 0.1 for width in (2, 4, 8, 16))]
    assert [time.seconds for time in measured.times] == pytest.approx(expected, abs=0.11)
    assert talk.context.cached() == talk.engine._slots.cached[0]


class DearClock(StepClock):
    """Each row takes a second."""

    def __call__(self) -> float:
        return float(sum(map(len, self._context.calls)))


@pytest.mark.parametrize("clock", [StepClock, DearClock])
@pytest.mark.parametrize("most", [20, 76, 300, 900])
def test_wide_steps_cost_at_most_one_plain_step_and_a_hundredth_of_the_time(most: int, clock: type[StepClock]) -> None:
    _, talk = probed(most, clock=clock)
    plain = Conversation(hashed, n_ctx=1000)
    plain.engine._clock = clock(plain.context)
    plain.ask("Hi", most=most)
    plain.run()
    lost = talk.engine._clock() - plain.engine._clock()
    assert lost <= (1 + most / 100) * clock(plain.context)() / most + 0.2, (
        "the clock's changes of width were not foreseen"
    )


def test_the_next_answer_measures_what_is_missing() -> None:
    known: tuple[StepTime, ...] = ()
    widths = []
    for _ in range(2):
        events, _ = probed(60, StepProbe(15, known))
        assert isinstance(events[-2], StepsMeasured)
        known = events[-2].times
        widths.append([time.width for time in known])
    assert widths[0] == [1, 2, 4, 8]
    assert widths[-1] == [1, 2, 4, 8, 16]


def test_a_short_answer_gives_no_times_and_a_narrow_context_those_that_it_has() -> None:
    events, _ = probed(6)
    assert events[-2] == StepsMeasured(1, ())
    assert isinstance(events[-1], Finished)
    events, _ = probed(100, n_outputs=8)
    assert isinstance(events[-2], StepsMeasured)
    assert [time.width for time in events[-2].times] == [1, 2, 4, 8]


def test_a_busy_machine_gives_no_times() -> None:
    probe = StepProbe()
    for number in range(100):
        probe.plan([1, 2], 15, StepShape(1, 1, number))
        probe.take(len)
        probe.record(1.0 + 3 * (number % 5))
    assert probe.times() == ()


def test_what_a_grammar_forbids_is_not_drafted() -> None:
    probe = StepProbe()
    for number in range(100):
        probe.plan([1, 2], 15, StepShape(1, 1, number))
        assert not probe.take(lambda tokens: 0)
        probe.record(1.0)
    assert probe.times() == (), "no step was wide"


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

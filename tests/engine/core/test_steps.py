"""Decode steps are measured without anything being lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from support.conversation import Conversation
from support.fake_context import FakeContext, endless

from llmrun.engine.llama.base import Aborted, CacheFull, DecodeError
from llmrun.protocol.speculation import StepTables, StepTime


class StepClock:
    """Each row takes a second, each token in the KV cache a hundredth, and a change of width a tenth."""

    def __init__(self, context: FakeContext) -> None:
        self._context = context

    def __call__(self) -> float:
        calls = self._context.calls
        widths = [0, *map(len, calls)]
        changes = sum(before != after for before, after in itertools.pairwise(widths))
        return sum(widths) + sum(call[0].position for call in calls) / 100 + changes / 10


def talked(n_tokens: int, *, n_ctx: int = 1000, n_batch: int = 512, **context: int) -> Conversation:
    talk = Conversation(endless, n_ctx=n_ctx, n_batch=n_batch, **context)
    talk.engine._clock = StepClock(talk.context)
    talk.answer("x" * (n_tokens - 4), most=5)
    talk.context.calls.clear()
    return talk


def never() -> bool:
    return False


def expected(depth: int) -> list[StepTime]:
    """A wide step is charged with the change back, too."""
    return [StepTime(width, depth, width + depth / 100 + (0.2 if width > 1 else 0)) for width in (1, 2, 3, 4, 8, 16)]


@pytest.mark.parametrize("n_seq_max", [1, 2])
def test_two_depths_are_measured_and_the_conversation_stays(n_seq_max: int) -> None:
    talk = talked(400, n_seq_max=n_seq_max)
    cached = talk.context.cached()
    times = talk.engine.measure_steps(never).times
    assert [time[:2] for time in times] == [time[:2] for time in expected(400) + expected(0)]
    assert [time.seconds for time in times] == pytest.approx([time.seconds for time in expected(400) + expected(0)])
    assert talk.context.cached() == cached == talk.engine._slots.cached[0]
    assert talk.engine._slots.budget.used == talk.context.n_used


def test_what_the_steps_after_a_wide_one_take_longer_is_its_cost() -> None:
    """As on a GPU that records a graph anew when it has been asked for twice."""
    talk = talked(10)

    def slow() -> float:
        widths = [len(call) for call in talk.context.calls]
        recorded = sum(
            before > 1 and first == second == 1
            for before, first, second in zip(widths, widths[1:], widths[2:], strict=False)
        )
        return StepClock(talk.context)() + recorded

    talk.engine._clock = slow
    times = talk.engine.measure_steps(never).times
    assert [time.seconds for time in times] == pytest.approx([time.seconds + (time.width > 1) for time in expected(0)])


@pytest.mark.parametrize("n_tokens", [10, 990])
def test_a_depth_that_says_little_or_has_no_room_is_left_out(n_tokens: int) -> None:
    talk = talked(n_tokens)
    assert {time.depth for time in talk.engine.measure_steps(never).times} == {0}


def test_widths_that_the_context_does_not_give() -> None:
    talk = talked(10, n_outputs=8)
    assert [time.width for time in talk.engine.measure_steps(never).times] == [1, 2, 3, 4, 8]


@pytest.mark.parametrize("step", range(0, 108, 5))
@pytest.mark.parametrize("fault", [None, Aborted, CacheFull])
def test_whatever_interrupts_leaves_everything_as_it_was(step: int, fault: type[Exception] | None) -> None:
    talk = talked(400)
    cached = talk.context.cached()
    interrupted: Callable[[], bool] = never
    if fault is None:
        interrupted = lambda: len(talk.context.calls) == step  # noqa: E731 - as short as never()
    else:
        talk.context.faults[step] = fault()
    assert talk.engine.measure_steps(interrupted).times == ()
    assert talk.context.cached() == cached == talk.engine._slots.cached[0]
    assert talk.engine._slots.budget.used == talk.context.n_used


def test_an_error_is_told_and_leaves_everything_as_it_was() -> None:
    talk = talked(400)
    cached = talk.context.cached()
    talk.context.faults[60] = DecodeError("it failed")
    with pytest.raises(DecodeError):
        talk.engine.measure_steps(never)
    assert talk.context.cached() == cached == talk.engine._slots.cached[0]


@pytest.mark.parametrize("call", ["state", "set_state"])
def test_without_memory_for_a_copy_a_slot_is_not_emptied_or_stays_empty(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    talk = talked(400)
    monkeypatch.setattr(talk.context, call, fail)
    assert {time.depth for time in talk.engine.measure_steps(never).times} == ({400} if call == "state" else {0, 400})
    assert talk.context.cached() == talk.engine._slots.cached[0]
    assert len(talk.engine._slots.cached[0]) == (400 if call == "state" else 0)


def test_without_memory_for_a_checkpoint_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    talk = talked(400)
    monkeypatch.setattr(talk.context, "has_checkpoints", True)
    monkeypatch.setattr(talk.context, "checkpoint", fail)
    assert talk.engine.measure_steps(never).times == ()
    assert len(talk.context.cached()) == 400


def test_a_state_that_does_not_come_back_is_not_said_to_be_cached() -> None:
    talk = talked(400)
    talk.context.state = lambda sequence_id: bytearray(b"bad")  # type: ignore[method-assign]
    assert {time.depth for time in talk.engine.measure_steps(never).times} == {0, 400}
    assert talk.context.cached() == talk.engine._slots.cached[0] == []
    assert talk.engine._slots.budget.used == 0


def test_nothing_is_measured_where_a_request_is_answered_or_nothing_can_be_cut() -> None:
    talk = Conversation(endless)
    talk.ask("Hi")
    assert talk.engine.measure_steps(never).times == ()
    assert Conversation(endless, cuts=False).engine.measure_steps(never).times == ()


def test_without_memory_for_a_copy_nothing_is_measured_and_nothing_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Conversation(endless, n_ctx=1000)
    talk.answer("x" * 100, most=5)
    held = talk.context.cached()

    def fails(slot: int) -> bytearray:
        raise MemoryError

    monkeypatch.setattr(talk.context, "state", fails)
    assert talk.engine.measure_steps(lambda: False) == StepTables()
    assert talk.context.cached() == held

"""Fewer threads decode while other programs need the cores, and all again when they don't."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.conversation import Conversation
from support.fake_context import endless, tokens_of

from llmrun.engine.core.policy import POLICY
from llmrun.engine.core.threads import MachineLoad, ThreadChooser
from llmrun.protocol.params import SamplingParams


class Machine:
    """A machine with a clock, on which other programs use some cores."""

    def __init__(self, others: float | None = 0.0) -> None:
        self.now = self.own = self.busy = 0.0
        self.others = others

    def wait(self, seconds: float, own_cores: float = 0.0) -> None:
        self.now += seconds
        self.own += seconds * own_cores
        self.busy += seconds * (own_cores + (self.others or 0.0))

    def load(self) -> MachineLoad:
        return MachineLoad(lambda: None if self.others is None else self.busy, lambda: self.own, lambda: self.now)

    def chooser(self, most: int, cores: int | None = None) -> ThreadChooser:
        return ThreadChooser(most, cores or most, self.load(), lambda: self.now)


def decode(
    machine: Machine, chooser: ThreadChooser, seconds: float, time_of: Callable[[int], float], n_rows: int = 1
) -> list[int]:
    """Decode for some seconds; return the threads of each step."""
    used, end = [], machine.now + seconds
    while machine.now < end:
        chooser.update()
        used.append(chooser.n_threads)
        took = time_of(chooser.n_threads)
        machine.wait(took)
        chooser.record(n_rows, 1, took)
    return used


def halting(n_threads: int) -> float:
    """Seconds of a step on two cores beside a busy program."""
    return {1: 0.006, 2: 0.160}[n_threads]


# ---- the load -------------------------------------------------------------------------------------------


def test_own_work_is_no_load_of_others() -> None:
    machine = Machine(others=0.5)
    load = machine.load()
    assert load.others is None
    machine.wait(0.1, own_cores=2.0)
    assert load.update()
    assert load.others == pytest.approx(0.5)


def test_a_window_is_long_enough_to_tell_and_short_enough_to_be_about_now() -> None:
    machine = Machine(others=1.0)
    load = machine.load()
    machine.wait(0.05)
    assert not load.update()
    machine.wait(0.1)
    assert load.update()
    machine.wait(0.2)
    assert not load.update(), "later windows are longer"
    machine.wait(60.0)
    assert not load.update(), "an idle minute says nothing about now"
    machine.others = 2.0
    machine.wait(0.3)
    assert load.update()
    assert load.others == pytest.approx(2.0)


def test_a_system_that_tells_no_load_changes_nothing() -> None:
    machine = Machine(others=None)
    chooser = machine.chooser(4)
    assert set(decode(machine, chooser, 5.0, lambda n: 0.01 * n)) == {4}


# ---- the choice -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "cores", "others", "threads"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.5, 2),  # a video beside it
        (2, 2, 0.8, 1),
        (2, 2, 2.0, 1),
        (8, 8, 1.0, 7),
        (8, 8, 2.7, 5),
        (8, 8, 16.0, 1),
        (8, 16, 7.0, 8),  # hardware threads beside the physical cores
        (8, 16, 9.0, 7),
        (1, 2, 2.0, 1),
    ],
)
def test_threads_leave_cores_to_others(most: int, cores: int, others: float, threads: int) -> None:
    machine = Machine(others)
    chooser = machine.chooser(most, cores)
    machine.wait(0.3)
    chooser.update()
    assert chooser.n_threads == threads
    assert chooser.is_busy == (threads < most)
    assert (chooser.chosen, chooser.most) == (threads, most)


def test_a_load_between_two_numbers_does_not_make_them_change_all_the_time() -> None:
    machine = Machine(0.8)
    chooser = machine.chooser(2)
    found = []
    for others in (0.8, 0.4, 0.5, 0.4, 0.1, 0.4, 0.5):
        machine.others = others
        machine.wait(0.3)
        chooser.update()
        found.append(chooser.n_threads)
    assert found == [1, 1, 1, 1, 2, 2, 2]


def test_a_quiet_machine_has_no_trials() -> None:
    machine = Machine(0.0)
    chooser = machine.chooser(4)
    assert set(decode(machine, chooser, 60.0, lambda n: 0.05)) == {4}


def test_all_threads_come_back_when_the_others_end() -> None:
    machine = Machine(2.0)
    chooser = machine.chooser(2)
    decode(machine, chooser, 3.0, halting)
    assert chooser.chosen == 1
    machine.others = 0.0
    used = decode(machine, chooser, 1.0, lambda n: 0.006)
    assert used[-1] == 2
    assert used.count(1) * 0.006 < 0.6


def test_trials_of_a_slower_number_cost_a_twentieth_of_the_time() -> None:
    machine = Machine(1.0)
    chooser = machine.chooser(2)
    used = decode(machine, chooser, 60.0, halting)
    lost = sum(halting(2) - halting(1) for n_threads in used[20:] if n_threads == 2)
    assert 0 < lost < 60.0 / 20 + halting(2)


def test_a_faster_number_is_kept_though_the_load_suggests_another() -> None:
    machine = Machine(1.0)
    chooser = machine.chooser(2)
    used = decode(machine, chooser, 10.0, lambda n: 0.02 / n)
    assert used[-1] == 2
    assert used.count(2) > len(used) / 2
    assert chooser.is_busy, "the machine is still watched"


def test_with_many_cores_both_directions_are_tried() -> None:
    machine = Machine(4.0)
    chooser = machine.chooser(8)
    used = decode(machine, chooser, 60.0, lambda n: 0.01 + abs(n - 2) * 0.01)
    assert used[-1] == 2
    assert {1, 2, 4, 8} & set(used[20:]) >= {2, 4}


def test_steps_of_other_widths_are_not_compared() -> None:
    """With each step of another width, a trial never ends in a choice by accident."""
    machine = Machine(1.0)
    chooser = machine.chooser(2)
    for n_rows in [1, 2, 3] * 400:
        decode(machine, chooser, 0.004, lambda n, n_rows=n_rows: 0.005 * n_rows, n_rows)  # type: ignore[misc]
    assert chooser.chosen == 1


# ---- in the loop ----------------------------------------------------------------------------------------


def test_a_busy_machine_in_the_loop() -> None:
    machine = Machine(2.0)
    chooser = machine.chooser(2)
    talk = Conversation(endless, threads=chooser, n_ctx=256, n_batch=128)
    machine.wait(0.3)
    prompt = "x" * POLICY.wide_batch
    talk.ask(prompt, most=3)
    talk.run()
    assert talk.context.most_threads == [2, 1, 1], "the wide batch has all threads, the steps after it one"
    assert talk.finished().stats.threads == (1, 2)
    assert talk.engine.status().threads == (1, 2)


def test_without_a_chooser_nothing_is_limited() -> None:
    talk = Conversation(endless)
    talk.answer("Hi", most=2)
    assert talk.context.most_threads == []
    assert talk.finished().stats.threads == (0, 0)
    assert talk.computed() == len(tokens_of("Hi")) + 1


@pytest.mark.parametrize(
    ("split_from", "is_repeatable", "most_threads"),
    [(None, True, {1}), (256, False, {1}), (256, True, {1, 2}), (0, True, {2})],
)
def test_answers_that_have_to_repeat_keep_the_threads_where_they_change_the_logits(
    split_from: int | None, is_repeatable: bool, most_threads: set[int]
) -> None:
    machine = Machine(2.0)
    talk = Conversation(endless, threads=machine.chooser(2), n_ctx=512)
    talk.context.split_from = split_from
    machine.wait(0.3)
    talk.ask("Hi", SamplingParams(seed=1 if is_repeatable else None), most=300)
    talk.run()
    assert {*talk.context.most_threads[1:]} == most_threads


def test_answers_beside_each_other_need_no_threads_to_repeat() -> None:
    """Attention of several tokens at once is not divided between threads."""
    machine = Machine(2.0)
    talk = Conversation(endless, threads=machine.chooser(2), n_seq_max=2)
    talk.context.split_from = 0
    machine.wait(0.3)
    for request in (1, 2):
        talk.ask("Hi", most=3, request=request)
    talk.run()
    assert {*talk.context.most_threads[1:-1]} == {1}

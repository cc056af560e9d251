"""Several steps in a row: every event but the times is as without."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from support.conversation import Conversation
from support.fake_context import END, endless, hashed, scripted

from llmrun import _native
from llmrun.engine.llama.base import Aborted, CacheFull, DecodeError, RunLimit
from llmrun.protocol.messages import Event, Failed, Finished, Stats
from llmrun.protocol.params import SamplingParams

TIMES = {
    name: getattr(Stats(), name)
    for name in ("prefill_seconds", "decode_seconds", "ttft_seconds", "itl_p50_seconds", "itl_p95_seconds")
} | {"overhead_seconds": 0.0}


def timeless(event: Event) -> Event:
    return event._replace(stats=replace(event.stats, **TIMES)) if isinstance(event, Finished) else event


def answered(talk: Conversation, *, in_runs: bool, **asked: Any) -> list[Event]:
    """The events of an answer; in runs of up to seven tokens, or one step at a time."""
    asked.setdefault("sampling", SamplingParams(temperature=0, seed=1))
    talk.ask("Hi", **asked)
    events: list[Event] = []
    limit = RunLimit(7, math.inf, _native.CancelFlag())
    while talk.engine.busy:
        events += talk.engine.step(limit if in_runs else None)
    slots = talk.engine._slots
    assert {slot: talk.context.cached(slot) for slot in slots.cached} == slots.cached
    assert slots.budget.used == talk.context.n_used
    return [timeless(event) for event in events]


@pytest.mark.parametrize("most", [None, 1, 2, 30, 300])
@pytest.mark.parametrize("stop", [(), ("k",), ("ef",), ("a", "qq")])
@pytest.mark.parametrize("ban", [(), ("b",)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_gives_the_events_of_single_steps(
    most: int | None, stop: tuple[str, ...], ban: tuple[str, ...], temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=5, repeat_penalty=1.2)
    plain, runs = (
        answered(Conversation(hashed, n_ctx=100), in_runs=each, sampling=sampling, most=most, stop=stop, ban=ban)
        for each in (False, True)
    )
    assert runs == plain


def test_the_end_of_an_answer_ends_a_run() -> None:
    talk = Conversation(scripted({"Hi": "Hello"}))
    assert answered(talk, in_runs=True) == answered(Conversation(scripted({"Hi": "Hello"})), in_runs=False)
    assert END not in talk.context.cached()


@pytest.mark.parametrize("call", range(1, 12))
@pytest.mark.parametrize("fault", [Aborted, CacheFull])
def test_a_failed_step_is_done_again(call: int, fault: type[Exception]) -> None:
    talk = Conversation(endless)
    talk.context.faults[call] = fault()
    plain = answered(Conversation(endless), in_runs=False, most=15)
    failed = answered(talk, in_runs=True, most=15)
    if fault is Aborted:
        assert failed == plain
    else:  # the only sequence can't get cells of others
        assert isinstance(failed[-1], Finished)


def test_an_error_ends_only_the_answer() -> None:
    talk = Conversation(endless)
    talk.context.faults[5] = DecodeError("it failed")
    assert isinstance(answered(talk, in_runs=True, most=15)[-1], Failed)
    assert isinstance(answered(talk, in_runs=True, most=15)[-1], Finished)


def test_dropped_tokens_are_not_explained() -> None:
    explained = []
    for in_runs in (False, True):
        talk = Conversation(endless)
        answered(talk, in_runs=in_runs, most=30, stop=("h",), remember=8, sampling=SamplingParams(seed=1))
        explained.append(talk.engine.finished(1).sampler.explain(8, 3))
    assert explained[0] == explained[1]


def test_models_that_cannot_cut_take_no_step_back() -> None:
    talk = Conversation(endless, cuts=False)
    answered(talk, in_runs=True, most=30, stop=("h",))
    assert len(talk.context.cached()) == len(talk.context.calls[0]) + len(talk.context.calls) - 1
    assert not talk.engine._can_run()


def test_random_interleavings() -> None:
    draws = random.Random(1)
    for _ in range(40):
        seed, most = draws.randrange(1000), draws.randrange(1, 40)
        sampling = SamplingParams(temperature=1.5, seed=seed)
        plain, runs = (
            answered(Conversation(hashed), in_runs=each, sampling=sampling, most=most) for each in (False, True)
        )
        assert runs == plain

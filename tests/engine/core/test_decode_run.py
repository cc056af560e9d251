"""Several steps in a row: every event but the times is as without."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.conversation import Conversation
from support.fake_context import END, endless, favouring, hashed, scripted, tokens_of
from support.seeds import for_seeds

from llmrun import _native
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.steps import StepCosts
from llmrun.engine.llama.base import Aborted, CacheFull, DecodeError, RunLimit
from llmrun.engine.prompt.thinking import ThinkingBudget
from llmrun.protocol.messages import Event, Failed, Finished, Stats, TextDelta
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.reasoning import ReasoningSyntax
from llmrun.protocol.speculation import Speculation

TIMES = {
    name: getattr(Stats(), name)
    for name in (
        "draft_gain",  # a run may decode more after the end of an answer
        "prefill_seconds",
        "decode_seconds",
        "ttft_seconds",
        "queue_seconds",
        "itl_p50_seconds",
        "itl_p95_seconds",
    )
} | {"overhead_seconds": 0.0}


def timeless(event: Event) -> Event:
    return event._replace(stats=replace(event.stats, **TIMES)) if isinstance(event, Finished) else event


def finish(talk: Conversation, *, in_runs: bool, is_streaming: bool = False) -> list[Event]:
    """Answer everything, in runs of up to seven tokens, each emitted at once if streaming; or one step at a time."""
    events: list[Event] = []

    def emit(more: list[Event]) -> float:
        events.extend(more)
        return 0.0

    limit = RunLimit(7, 0.0 if is_streaming else math.inf, _native.CancelFlag())
    while talk.engine.busy:
        more = talk.engine.step(limit, emit if is_streaming else None) if in_runs else talk.engine.step()
        events += more
    slots = talk.engine._slots
    assert {slot: talk.context.cached(slot) for slot in slots.cached} == slots.cached
    assert slots.budget.used == talk.context.n_used
    return [timeless(event) for event in events]


def answered(talk: Conversation, *, in_runs: bool, **asked: Any) -> list[Event]:
    asked.setdefault("sampling", SamplingParams(temperature=0, seed=1))
    talk.ask("Hi", **asked)
    return finish(talk, in_runs=in_runs)


def by_request(events: list[Event]) -> dict[int, list[Event]]:
    """The events of each request; how those of several are mixed does not matter."""
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event.request, []).append(event)
    return found


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


@pytest.mark.parametrize("most_thoughts", [0, 1, 5, 30, 300])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("is_streaming", [False, True])
def test_reasoning_is_closed_at_its_budget_within_runs(most_thoughts: int, *, inside: bool, is_streaming: bool) -> None:
    tags = ReasoningSyntax("<think>", "</think>")
    answer = "" if inside else "<think>"

    def thinking(tokens: Sequence[int]) -> Sequence[float]:
        said = bytes(tokens).decode()[2:]
        return hashed(tokens) if said.startswith(answer) else favouring(ord(answer[len(said)]))

    found, n_calls = [], []
    for in_runs in (False, True):
        talk, budget = Conversation(thinking, n_ctx=200), ThinkingBudget(tags, inside, most_thoughts)
        talk.ask("Hi", SamplingParams(temperature=1.0, seed=5), most=80, thinking=budget)
        step, n_steps = talk.engine.step, itertools.count()
        talk.engine.step = lambda *args, step=step, n_steps=n_steps: (next(n_steps), step(*args))[1]  # type: ignore[method-assign]
        events = finish(talk, in_runs=in_runs, is_streaming=is_streaming)
        found.append("".join(event.text for event in events if isinstance(event, TextDelta)))
        n_calls.append(len(talk.context.calls) / next(n_steps))
    assert found[0] == found[1]
    assert ("</think>" in found[0]) == (most_thoughts < 80)
    assert n_calls[0] <= 1 < 2 < n_calls[1], "native code decodes"


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


def crowd(draws: random.Random, *, n_requests: int, is_plain: bool = True) -> list[dict[str, Any]]:
    """Requests of different lengths, stop strings and samplers; some with bans, unless all are plain."""
    return [
        {
            "prompt": "".join(draws.choices("xyz", k=draws.randrange(1, 12))),
            "sampling": SamplingParams(temperature=draws.choice([0.0, 1.5]), seed=draws.randrange(1000)),
            "most": draws.choice([None, 1, 2, 9, 30]),
            "stop": draws.choice([(), ("k",), ("ef", "q"), ("a", "b", "c")]),
            "ban": () if is_plain else draws.choice([(), ("d",)]),
            "request": number,
            "remember": 4,
        }
        for number in range(n_requests)
    ]


def of_crowd(requests: list[dict[str, Any]], how: dict[str, bool], **context: Any) -> tuple[Any, Conversation]:
    talk = Conversation(context.pop("model", hashed), n_ctx=60, n_seq_max=3, **context)
    for asked in requests:
        talk.ask(**asked)
    return by_request(finish(talk, **how)), talk


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("layout", [{}, {"streams": True}, {"on_device": True}, {"streams": True, "on_device": True}])
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("is_streaming", [True, False])
def test_runs_of_several_sequences(seed: int, layout: dict[str, int], is_plain: bool, is_streaming: bool) -> None:
    requests = crowd(random.Random(seed), n_requests=2 + seed % 5, is_plain=is_plain)
    how = {"in_runs": True, "is_streaming": is_streaming}
    plain, _ = of_crowd(requests, {"in_runs": False}, **layout)
    runs, talk = of_crowd(requests, how, **layout)
    assert runs == plain
    assert any(len(call) > 1 for call in talk.context.calls)


def of_few_letters(tokens: Sequence[int]) -> Sequence[float]:
    return [value if ord("a") <= token < ord("d") else -9.0 for token, value in enumerate(hashed(tokens))]


@for_seeds(40)
@pytest.mark.parametrize("is_streaming", [True, False])
def test_runs_and_steps_have_the_same_drafts(seed: int, is_streaming: bool) -> None:
    """Of one sequence, and of several that share their cells; with streams of their own there are none."""
    draws = random.Random(seed)
    speculation = Speculation(draws.choice([3, 15]), only_if_it_pays=draws.random() < 0.5)
    slope = draws.choice([8, 40])
    costs = StepCosts([(width, 1 + width / slope) for width in (1, 4, 8, 16)])
    requests = crowd(draws, n_requests=draws.choice([1, 1, 3]))
    layout = {"streams": draws.random() < 0.3, "n_outputs": draws.choice([16, 7]), "on_device": draws.random() < 0.5}
    talks = []
    for in_runs in (False, True):
        drafted = [
            {
                **asked,
                "drafting": Drafting(speculation, tokens, None, costs, is_repeatable=True),
            }
            for asked in requests
            for tokens in [tokens_of(asked["prompt"])]
        ]
        how = {"in_runs": in_runs, "is_streaming": is_streaming}
        talks.append(of_crowd(drafted, how, model=of_few_letters, **layout))
    (plain, slow), (runs, fast) = talks
    assert runs == plain
    if len(requests) == 1:
        widths = [[len(call) for call in talk.context.calls] for talk in (slow, fast)]
        assert widths[0] == widths[1][: len(widths[0])], "a run may go on after the end of an answer"


@pytest.mark.parametrize("fault", [Aborted, CacheFull, DecodeError])
@pytest.mark.parametrize("call", range(1, 14))
@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("on_device", [True, False])
def test_a_failed_step_of_several_sequences_is_done_again(
    call: int, fault: type[Exception], is_streaming: bool, on_device: bool
) -> None:
    requests = crowd(random.Random(4), n_requests=3)
    faults = {call: DecodeError("it failed") if fault is DecodeError else fault()}
    plain, _ = of_crowd(requests, {"in_runs": False})
    talk = Conversation(hashed, n_ctx=60, n_seq_max=3, on_device=on_device)
    talk.context.faults = faults
    for asked in requests:
        talk.ask(**asked)
    failed = by_request(finish(talk, in_runs=True, is_streaming=is_streaming))
    for request, events in failed.items():  # an error ends the last answer, which has nobody left to blame
        assert (
            events == plain[request] or (fault is DecodeError and isinstance(events[-1], Failed)) or fault is CacheFull
        )
    assert failed.keys() == plain.keys()


def test_one_sequence_without_a_possible_token_ends_alone() -> None:
    def damaged(tokens: Sequence[int]) -> Sequence[float]:
        return [math.nan] * len(endless(tokens)) if tokens[0] == ord("x") and len(tokens) == 9 else endless(tokens)

    sampling = SamplingParams(temperature=0, seed=1)
    requests = [
        {"prompt": prompt, "request": number, "most": 20, "remember": 4, "sampling": sampling}
        for number, prompt in enumerate(["ab", "xy", "cd"])
    ]
    plain, _ = of_crowd(requests, {"in_runs": False}, model=damaged)
    runs, _ = of_crowd(requests, {"in_runs": True}, model=damaged)
    assert runs == plain
    assert isinstance(runs[1][-1], Failed)


def test_cancels_between_runs() -> None:
    draws = random.Random(2)
    for _ in range(20):
        talk = Conversation(hashed, n_ctx=60, n_seq_max=3)
        requests = crowd(draws, n_requests=4)
        plain, _ = of_crowd(requests, {"in_runs": False})
        for asked in requests:
            talk.ask(**asked)
        events: list[Event] = []
        for _ in range(draws.randrange(2, 6)):
            events += talk.engine.step(RunLimit(7, math.inf, _native.CancelFlag()))
        cancelled = draws.randrange(4)
        talk.engine.cancel(cancelled)
        found = by_request([*map(timeless, events), *finish(talk, in_runs=True)])
        for request, answer in found.items():
            assert answer == plain[request] or request == cancelled
            n_shown = max(0, len(answer) - 2)
            assert answer[:n_shown] == plain[request][:n_shown]


def test_several_sequences_run_together() -> None:
    """The number of decode calls and the emitted events: each step of a stream by itself, none of them late."""
    talk = Conversation(endless, n_ctx=60, n_seq_max=3)
    for number in range(3):
        talk.ask("Hi" * (1 + number), most=10, request=number)
    while not all(sequence.is_plain for sequence in talk.engine._active) or not talk.engine._active:
        talk.engine.step()
    emitted: list[tuple[int, int]] = []

    def emit(events: list[Event]) -> float:
        emitted.append((len(talk.context.calls), len(events)))
        return 0.0

    n_before = len(talk.context.calls)
    talk.engine.step(RunLimit(18, 0.0, _native.CancelFlag()), emit)
    assert emitted == [(n_before + number, 3) for number in range(1, 6)]
    assert len(talk.context.calls) == n_before + 6


def test_a_device_computes_the_next_step_while_text_is_handled() -> None:
    """A stop string is found when the next step is submitted: its tokens are the others', and one is taken back."""
    talk = Conversation(endless, n_ctx=60, n_seq_max=3, streams=True, on_device=True)
    for number in range(3):
        talk.ask("Hi" * (1 + number), most=20, request=number, stop=("n",) if number == 1 else ())
    while not all(sequence.is_plain for sequence in talk.engine._active) or not talk.engine._active:
        talk.events += talk.engine.step()
    emitted: list[int] = []

    def emit(events: list[Event]) -> float:
        emitted.append(len(talk.context.calls))
        talk.events.extend(events)
        return 0.0

    n_before = len(talk.context.calls)
    talk.events += talk.engine.step(RunLimit(64, 0.0, _native.CancelFlag()), emit)
    assert emitted == list(range(n_before + 2, n_before + 2 + len(emitted))), "the next step is submitted before"
    assert talk.finished(1).reason == "stop"
    assert len(emitted) == len(talk.context.calls) - n_before - 2 < 20, "the run ends with the submitted step"
    assert talk.context.cached(1) == talk.engine._slots.cached[1]
    assert len(talk.context.cached(1)) == talk.finished(1).stats.context_used
    talk.run()
    for number in (0, 2):
        text, _ = Conversation(endless, n_ctx=60).answer("Hi" * (1 + number), most=20)
        assert talk.text(number) == text
    assert talk.computed() == 2 + 4 + 6 + 2 * 19 + talk.finished(1).stats.completion_tokens


def test_a_request_that_arrives_ends_a_run() -> None:
    talk = Conversation(endless, n_ctx=60, n_seq_max=2)
    interrupted = _native.CancelFlag()
    talk.ask("Hi", most=40)
    talk.engine.step()
    talk.engine.step()
    talk.context.before_decode = lambda number: interrupted.set()
    n_before = len(talk.context.calls)
    talk.engine.step(RunLimit(30, 0.0, interrupted), lambda events: 0.0)
    assert len(talk.context.calls) == n_before + 1

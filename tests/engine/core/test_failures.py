"""A failure of one request ends only that request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.conversation import Conversation
from support.fake_context import N_VOCAB, endless, favouring, hashed, scripted

from llmrun import _native
from llmrun.engine.core.repeats import RepeatGuard
from llmrun.engine.core.sequence import Sequence as SequenceState
from llmrun.engine.llama.base import DecodeError, RunLimit
from llmrun.errors import OutOfMemoryError, UsageError
from llmrun.protocol.answer import AnswerSplitter
from llmrun.protocol.messages import Failed
from llmrun.protocol.params import SamplingParams


@pytest.mark.parametrize(
    ("error", "code"),
    [(DecodeError("no", why="status 1"), "internal"), (OutOfMemoryError("no"), "not-enough-memory")],
)
@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_batch_that_fails(error: DecodeError, code: str, call: int) -> None:
    talk = Conversation(scripted({"x" * 10: "abc"}), n_batch=8)
    talk.context.faults[call] = error
    talk.ask("x" * 10)
    talk.run()
    assert talk.failed() == Failed(1, code, "no", error.why)
    assert talk.context.cached() == []
    assert talk.answer("x" * 10) == ("abc", "stop"), "the engine lives on"
    assert talk.started().reused_tokens == 0


@pytest.mark.parametrize("cuts", [True, False])
def test_a_batch_that_fails_is_only_the_fault_of_one(cuts: bool) -> None:
    """The failing request is unknown, so each one is tried alone."""
    talk = Conversation(hashed, n_seq_max=3, n_batch=64, cuts=cuts)
    talk.context.poison = ord("!")
    prompts = {1: "Hi", 2: "No", 3: "x" * 30 + "!"}
    talk.ask(prompts[1], most=12, request=1)
    talk.ask(prompts[2], most=12, request=2)
    talk.events += talk.engine.step() + talk.engine.step() + talk.engine.step()
    talk.ask(prompts[3], most=12, request=3)
    talk.run()
    assert talk.failed(3).code == "internal"
    for request in (1, 2):
        assert talk.text(request) == Conversation(hashed).answer(prompts[request], most=12)[0]
    assert len(talk.context.calls[-1]) == 2, "afterwards they are computed together again"


def test_a_failure_of_all_ends_all() -> None:
    talk = Conversation(hashed, n_seq_max=3)
    for call in range(20):
        talk.context.faults[call] = OutOfMemoryError("no")
    for request in range(3):
        talk.ask("Hi", most=3, request=request)
    talk.run()
    assert [talk.failed(request).code for request in range(3)] == ["not-enough-memory"] * 3
    talk.context.faults.clear()
    assert talk.answer("Hi", most=3)[1] == "length"


@pytest.mark.parametrize("logit", [math.nan, math.inf])
def test_logits_that_are_not_numbers(logit: float) -> None:
    def model(tokens: Sequence[int]) -> Sequence[float]:
        return [*favouring(ord("a"))[:-1], logit] if len(tokens) == 4 else favouring(ord("a"))

    talk = Conversation(model)
    talk.ask("Hi")
    talk.run()
    assert talk.text() == "aa"
    assert talk.failed().code == "bad-logits"
    assert talk.failed().hint
    assert talk.answer("H", most=2) == ("aa", "length")


def test_nothing_left_to_sample() -> None:
    talk = Conversation(endless)
    talk.ask("Hi", SamplingParams(logit_bias=tuple((token, -math.inf) for token in range(N_VOCAB))))
    talk.run()
    assert talk.failed().code == "bad-logits"
    assert "logit_bias" in talk.failed().hint


def test_bad_logits_of_one_do_not_hurt_the_other() -> None:
    def model(tokens: Sequence[int]) -> Sequence[float]:
        return [math.nan] * N_VOCAB if tokens[0] == ord("!") else endless(tokens)

    talk = Conversation(model, n_seq_max=2)
    talk.ask("!!", request=1)
    talk.ask("Hi", request=2, most=4)
    talk.run()
    assert talk.failed(1).code == "bad-logits"
    assert talk.text(2) == "cdef"


def test_what_a_failed_request_has_computed_is_not_reused() -> None:
    """Not even from host memory, to which prefixes move while others run."""
    prompt = "x" * 300

    def damaged(tokens: Sequence[int]) -> Sequence[float]:
        return [math.nan] * N_VOCAB if len(tokens) == 303 and tokens[0] == ord("x") else endless(tokens)

    talk = Conversation(damaged, n_ctx=2000, n_batch=512, n_seq_max=3)
    talk.ask("Hi", most=60, request=1)
    talk.ask(prompt, request=2)
    while not any(isinstance(event, Failed) for event in talk.events):
        talk.events += talk.engine.step()
    talk.ask(prompt, most=2, request=3)
    talk.run()
    assert talk.started(3).reused_tokens == 0


class Broken:
    """Whatever a sequence holds, with a mistake of ours: from a call on, a method raises."""

    def __init__(self, method: str, calls: int = 0, like: Any = None) -> None:
        self._method, self._left, self._like = method, calls, like

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            return self._call
        return getattr(self._like, name)

    def _call(self, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise KeyError("ours")
        return getattr(self._like, self._method)(*arguments, **options)


def break_sequence(sequence: SequenceState, part: str) -> None:
    if part in ("push", "finish"):
        sequence.text = Broken(part, 3 * (part == "push"), sequence.text)  # type: ignore[assignment]
    elif part in ("feed", "flush"):
        sequence.splitter = Broken(part, 3 * (part == "feed"), AnswerSplitter(()))  # type: ignore[assignment]
    elif part == "itl_quantile":
        sequence.metrics = Broken(part, 0, sequence.metrics)  # type: ignore[assignment]
    elif part == "guard":
        sequence.guard = Broken("push", 3, RepeatGuard())  # type: ignore[assignment]
    elif part == "plan":
        sequence.drafting = Broken("plan", 0, SimpleNamespace(model=None, is_native=False, close=lambda sequence: None))  # type: ignore[assignment]
    else:
        like = SimpleNamespace(mask=lambda: None, forced=list, accept=lambda token: None, refuses=lambda token: False)
        sequence.sampler._constraint = Broken(part, 3, like)  # type: ignore[assignment]


BREAKABLE = ("push", "finish", "feed", "flush", "itl_quantile", "guard", "plan", "mask", "forced", "accept", "refuses")


@pytest.mark.parametrize("in_runs", [False, True], ids=["steps", "runs"])
@pytest.mark.parametrize("n_others", [0, 2])
@pytest.mark.parametrize("part", BREAKABLE)
def test_a_mistake_in_one_sequence_fails_that_one(part: str, n_others: int, in_runs: bool) -> None:
    """Its neighbours' texts are what they are alone, and the next request with the same prompt is answered."""
    talk = Conversation(hashed, n_seq_max=3)
    talk.ask("Hello", most=20, request=1)
    break_sequence(talk.engine._waiting[0], part)
    for request in range(2, 2 + n_others):
        talk.ask(f"No {request}", most=20, request=request)
    talk.engine.can_draft = talk.engine._drafts = talk.engine._drafts_requested = part == "plan"
    while talk.engine.busy:
        talk.events += talk.engine.step(RunLimit(7, math.inf, _native.CancelFlag()) if in_runs else None)
    failed = talk.failed(1)
    assert (failed.code, failed.why) == ("internal-error", "KeyError")
    assert "KeyError: 'ours'" in failed.trace
    for request in range(2, 2 + n_others):
        assert talk.text(request) == Conversation(hashed).answer(f"No {request}", most=20)[0]
    assert talk.answer("Hello", most=20)[0] == Conversation(hashed).answer("Hello", most=20)[0]


def test_a_mistake_at_the_end_of_a_cancelled_one_is_its_own() -> None:
    talk = Conversation(hashed, n_seq_max=2)
    talk.ask("Hello", request=1)
    talk.ask("No", most=9, request=2)
    break_sequence(talk.engine._waiting[0], "finish")
    talk.events += talk.engine.step() + talk.engine.step()
    talk.engine.cancel(1)
    talk.run()
    assert talk.failed(1).code == "internal-error"
    assert talk.text(2) == Conversation(hashed).answer("No", most=9)[0]


def test_too_little_memory_to_sample_is_no_mistake_of_ours() -> None:
    talk = Conversation(endless, n_seq_max=2)
    talk.ask("Hi", request=1)
    like = SimpleNamespace(mask=lambda: bytes(1 << 62), forced=list)
    talk.engine._waiting[0].sampler._constraint = like  # type: ignore[assignment]
    talk.run()
    assert talk.failed(1).code == "not-enough-memory"


def test_a_biased_token_outside_the_vocabulary() -> None:
    talk = Conversation(endless)
    with pytest.raises(UsageError, match="logit_bias"):
        talk.ask("Hi", SamplingParams(logit_bias=((N_VOCAB, 1.0),)))
    assert not talk.engine.busy

"""A failure of one request ends only that request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from support.conversation import Conversation
from support.fake_context import N_VOCAB, endless, favouring, hashed, scripted

from llmrun.engine.llama.base import DecodeError
from llmrun.errors import OutOfMemoryError, UsageError
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


def test_a_biased_token_outside_the_vocabulary() -> None:
    talk = Conversation(endless)
    with pytest.raises(UsageError, match="logit_bias"):
        talk.ask("Hi", SamplingParams(logit_bias=((N_VOCAB, 1.0),)))
    assert not talk.engine.busy

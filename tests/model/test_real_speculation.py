"""Speculation with the real model: another width of batch may round differently, and nothing else differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Finished, Generate, Message, Stats, TextDelta, TokenLogprob
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation
from llmrun.runner.client import EngineClient

TABLE = "\n".join(f"station {number}, line {number % 3}, opened in {1900 + 7 * number}" for number in range(12))
PROMPTS = [
    f"Repeat this list without changing anything.\n\n{TABLE}",
    "Write the word hello twenty times.",
    "Write the names of the days of a week as a JSON list, then again in upper case.",
    "Tell me a story about a fox.",
]
ROUNDING = 0.2
"""Between the logarithms of two probabilities: what other kernels, or another order of sums, make of them."""


@pytest.fixture
def engine(model_path: Path) -> EngineClient:
    runner = EngineClient()
    runner.load(Load(str(model_path), n_ctx=2048, threads=2))
    return runner


def answer(engine: EngineClient, prompt: str, speculation: Speculation | None) -> tuple[list[TokenLogprob], Stats]:
    """80 tokens, the likeliest each, and what could have stood in their places."""
    sampling, limits = SamplingParams(temperature=0.0), Limits(max_tokens=80)
    asked = AnswerRequest(
        (Message("user", prompt),), sampling=sampling, limits=limits, logprobs=2, speculation=speculation
    )
    tokens: list[TokenLogprob] = []
    for event in engine.submit(Generate(engine.next_request(), asked)):
        if isinstance(event, TextDelta):
            tokens += event.logprobs
        if isinstance(event, Finished):
            return tokens, event.stats
    raise AssertionError("it did not finish")


def assert_a_tie_where_they_differ(plain: list[TokenLogprob], drafted: list[TokenLogprob]) -> None:
    for expected, found in zip(plain, drafted, strict=False):
        if expected.bytes != found.bytes:
            (_, _, likeliest), (_, _, second) = expected.top
            assert likeliest - second < ROUNDING
            return
        assert found.logprob == pytest.approx(expected.logprob, abs=ROUNDING)
    assert len(plain) == len(drafted)


@pytest.mark.slow
def test_greedy_answers_differ_at_ties_only(engine: EngineClient) -> None:
    try:
        accepted = 0
        for prompt in PROMPTS:
            plain, _ = answer(engine, prompt, None)
            drafted, stats = answer(engine, prompt, Speculation(7))
            assert_a_tie_where_they_differ(plain, drafted)
            accepted += stats.accepted_tokens
            again, same = answer(engine, prompt, Speculation(7))
            assert again == drafted, "the same request takes the same steps"
            assert (same.drafted_tokens, same.accepted_tokens) == (stats.drafted_tokens, stats.accepted_tokens)
        assert accepted > 20
    finally:
        engine.close()


@pytest.mark.slow
def test_a_draft_model_changes_nothing_but_the_steps(engine: EngineClient, model_path: Path) -> None:
    """The model drafts for itself: what it is sure of is what it says."""
    beside = Load(str(model_path), n_ctx=2048, threads=2)
    pair = EngineClient()
    pair.load(replace(beside, draft=beside))
    try:
        for prompt in PROMPTS[1:]:
            plain, _ = answer(engine, prompt, None)
            drafted, stats = answer(pair, prompt, Speculation(7))
            assert_a_tie_where_they_differ(plain, drafted)
            assert stats.draft_steps > 10
            assert stats.accepted_tokens > 0.8 * stats.drafted_tokens > 10
            assert answer(pair, prompt, Speculation(7))[0] == drafted, "the same request takes the same steps"
    finally:
        engine.close()
        pair.close()

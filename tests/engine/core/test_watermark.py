"""Watermarks in the loop: an answer carries the mark, whatever is taken back, forced or forked on its way."""

from __future__ import annotations

import pytest
from support.constraints import AfterA
from support.conversation import Conversation
from support.fake_context import N_VOCAB, hashed

from llmrun.errors import UsageError
from llmrun.lab.insight.watermark import WatermarkFinding, find_watermark
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.watermark import fingerprint, read_watermark

KEY = "a long secret"
SCHEMES = ("green", "green,selfhash=3")


def marked(watermark: str) -> SamplingParams:
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7}
    return SamplingParams(watermark=watermark, watermark_key=KEY, **options)  # type: ignore[arg-type]


def found(watermark: str, text: str, key: str = KEY) -> WatermarkFinding:
    return find_watermark(read_watermark(watermark), key, N_VOCAB, list(text.encode()))


@pytest.mark.parametrize("watermark", SCHEMES)
def test_an_answer_carries_the_mark(watermark: str) -> None:
    text, _ = Conversation(hashed, n_ctx=400).answer("Hi", marked(watermark), most=300)
    assert found(watermark, text).z > 5
    assert found(watermark, text, "another one").z < 4


@pytest.mark.parametrize("watermark", SCHEMES)
def test_what_is_taken_back_leaves_no_trace(watermark: str) -> None:
    free, _ = Conversation(hashed, n_ctx=400).answer("Hi", marked(watermark), most=300)
    bans = tuple(free[at : at + 2] for at in range(0, 300, 10))
    talk = Conversation(hashed, n_ctx=400)
    text, _ = talk.answer("Hi", marked(watermark), most=300, ban=bans)
    assert talk.finished().stats.retracted_tokens > 0
    assert found(watermark, text).z > 5


@pytest.mark.parametrize("watermark", SCHEMES)
def test_a_grammar_and_a_mark(watermark: str) -> None:
    text, _ = Conversation(hashed, n_ctx=400).answer("Hi", marked(watermark), most=300, constraint=AfterA())
    assert found(watermark, text).z > 3


def test_explanations_end_with_it() -> None:
    talk = Conversation(hashed, n_ctx=400)
    talk.answer("Hi", marked("green"), most=5, remember=5)
    choices = talk.engine.finished(1).sampler.explain(5, 3)
    assert [choice.steps[-1].name for choice in choices] == ["green"] * 5


def test_a_fingerprint_is_no_key() -> None:
    sampling = SamplingParams(watermark="green", watermark_key=fingerprint(KEY))
    with pytest.raises(UsageError, match="key is needed"):
        Conversation(hashed).answer("Hi", sampling)

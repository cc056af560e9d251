"""llama-server's own completions as data."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support import answers

from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.messages import Stats, TokenLogprob
from llmrun.protocol.params import Limits
from llmrun.server.answer import Envelope
from llmrun.server.protocols.llama_server import NativeWriter, read, read_infill

STATS = Stats(prompt_tokens=10, reused_tokens=4, completion_tokens=3, prefill_seconds=0.5, decode_seconds=1.0)


def events(data: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]


def test_a_completion() -> None:
    asked = read({"prompt": "Once", "n_predict": 9, "temperature": 0.5, "stop": ["."], "stream": True, "id_slot": 1})
    assert (asked.request.prompt, asked.request.limits) == ("Once", Limits(9, (".",)))
    assert (asked.sampling, asked.stream, asked.ignored) == ({"temperature": 0.5}, True, ("id_slot",))
    assert read({"prompt": [5, 6], "n_probs": 2}).request.prompt_tokens == (5, 6)
    for wrong in ({}, {"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}):
        with pytest.raises(UsageError):
            read(wrong)


def test_a_gap() -> None:
    body = {"input_prefix": "def f(", "input_suffix": ")", "prompt": "a", "input_extra": [{"text": "x"}]}
    asked = read_infill(body)
    assert (asked.request.prompt, asked.request.suffix, asked.ignored) == ("def f(a", ")", ("input_extra",))
    assert read_infill({}).request.suffix == ""


def test_timings_of_drafts() -> None:
    made = NativeWriter({"prompt": "Once"}, Envelope("", 0, "m"))
    stats = replace(STATS, completion_tokens=30, decode_steps=12, drafted_tokens=20, accepted_tokens=18)
    for event in (answers.started(10, 4), answers.finished("stop", stats)):
        made.feed(0, event)
    timings = made.whole()["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"], timings["predicted_per_step"]) == (20, 18, 2.5)


@pytest.mark.parametrize(
    ("reason", "stop", "kind"), [("stop", "", "eos"), ("stop", ".", "word"), ("length", "", "limit")]
)
def test_what_is_written(reason: str, stop: str, kind: str) -> None:
    made = NativeWriter({"prompt": "Once"}, Envelope("", 0, "m"))
    token = TokenLogprob("b", (98,), -0.5, ())
    parts = (answers.started(10, 4), answers.text("a"), answers.text("b", (token,)))
    streamed = events(
        made.begin() + b"".join(made.feed(0, part) for part in (*parts, answers.finished(reason, STATS, stop)))
    )
    assert [(each["content"], each["stop"]) for each in streamed] == [("a", False), ("b", False)]
    assert streamed[1]["completion_probabilities"][0]["logprob"] == -0.5
    (last,) = events(made.end())
    whole = made.whole()
    assert (last["content"], whole["content"]) == ("", "ab")
    assert (last["stop_type"], last["stopping_word"], last["tokens_evaluated"]) == (kind, stop, 10)
    assert (whole["timings"]["prompt_n"], whole["timings"]["predicted_n"]) == (6, 3)
    assert "draft_n" not in whole["timings"]
    assert events(made.error(LlmrunError("it broke")))[0]["error"]["message"] == "it broke"

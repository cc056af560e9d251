"""llama-server's own completions as data."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from support import answers

from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.messages import (
    AnswerPart,
    AnswerRequest,
    Event,
    PrefillProgress,
    Stats,
    TextDelta,
    TokenLogprob,
)
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.server.answer import Envelope
from llmrun.server.protocols.llama_server import NativeWriter, read, read_infill
from llmrun.server.protocols.timings import generation_settings

STATS = Stats(prompt_tokens=10, reused_tokens=4, completion_tokens=3, prefill_seconds=0.5, decode_seconds=1.0)


def events(data: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]


def test_a_completion() -> None:
    asked = read({"prompt": "Once", "n_predict": 9, "temperature": 0.5, "stop": ["."], "stream": True, "id_slot": 1})
    assert (asked.request.prompt, asked.request.limits) == ("Once", Limits(9, (".",)))
    assert (asked.sampling, asked.stream, asked.ignored) == ({"temperature": 0.5}, True, ("id_slot",))
    assert read({"prompt": [5, 6], "n_probs": 2}).request.prompt_tokens == (5, 6)
    for wrong in ({}, {"prompt": []}, {"prompt": "a", "n": 0}, {"prompt": "a", "response_fields": [1]}):
        with pytest.raises(UsageError):
            read(wrong)


def test_several_prompts_of_all_kinds() -> None:
    lora = [{"id": 0, "scale": 0.5}]
    prompts = ["a", [5, 6], {"prompt_string": "b"}, [5, "c", 6, "d"]]
    asked = read({"prompt": prompts, "n_cmpl": 2, "lora": lora})
    given = [(each.prompt, each.prompt_tokens) for each in (asked.request, *asked.others)]
    assert given == [("a", ()), ("", (5, 6)), ("b", ()), ("", (5, "c", 6, "d"))]
    assert {each.adapters for each in (asked.request, *asked.others)} == {((0, 0.5),)}
    assert (asked.n, asked.n_choices) == (2, 8)
    mixed = read({"prompt": ["c", 6]})
    assert (mixed.request.prompt_tokens, mixed.n_choices) == (("c", 6), 1), "a list with an id is one prompt"


def test_what_else_is_asked_for() -> None:
    """Each field is obeyed; what is not is named."""
    plain = read({"prompt": "a"}).request
    assert (plain.token_ids, plain.logprobs, plain.processed_logprobs) == (False, None, False)
    body = {"prompt": "a", "return_tokens": True, "n_probs": 3, "post_sampling_probs": True, "return_progress": True}
    asked = read(body | {"response_fields": ["content"], "cache_prompt": True, "min_keep": 2, "t_max_predict_ms": 9})
    assert (asked.request.token_ids, asked.request.logprobs, asked.request.processed_logprobs) == (True, 3, True)
    assert asked.ignored == ("return_progress", "min_keep", "t_max_predict_ms"), "progress is for streams"
    streamed = read(body | {"stream": True, "return_tokens": False})
    assert (streamed.request.token_ids, streamed.ignored) == (True, ()), "as in llama-server, a stream has all ids"


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


def written(body: dict[str, Any], *said: Event) -> NativeWriter:
    """What is written of an answer."""
    made = NativeWriter(body, Envelope("", 0, "m"))
    for event in (answers.started(10, 4), *said):
        made.feed(0, event)
    return made


@pytest.mark.parametrize(
    ("reason", "stop", "kind"), [("stop", "", "eos"), ("stop", ".", "word"), ("length", "", "limit")]
)
def test_what_is_written(reason: str, stop: str, kind: str) -> None:
    made = NativeWriter({"prompt": "Once", "stream": True}, Envelope("", 0, "m"))
    token = TokenLogprob("b", (98,), -0.5, (("c", (99,), -1.0),), ids=(7, 8))
    said = (answers.text("a")._replace(ids=(5,)), answers.text("b", (token,))._replace(ids=(6, 7)))
    parts = (answers.started(10, 4), *said, answers.finished(reason, STATS, stop))
    *streamed, last = events(made.begin() + b"".join(made.feed(0, part) for part in parts) + made.end())
    assert [(each["content"], each["tokens"], each["stop"]) for each in streamed] == [
        ("a", [5], False), ("b", [6, 7], False)
    ]  # fmt: skip
    (entry,) = streamed[1]["completion_probabilities"]
    assert (entry["id"], entry["logprob"], entry["top_logprobs"][0]["id"]) == (7, -0.5, 8)
    whole = made.whole()
    assert (last["content"], whole["content"]) == ("", "ab")
    assert (last["tokens"], whole["tokens"]) == ([], [5, 6, 7])
    assert (last["stop_type"], last["stopping_word"], last["tokens_evaluated"]) == (kind, stop, 10)
    assert (whole["timings"]["prompt_n"], whole["timings"]["predicted_n"]) == (6, 3)
    assert "draft_n" not in whole["timings"]
    assert events(made.error(LlmrunError("it broke")))[0]["error"]["message"] == "it broke"


def test_tags_of_reasoning_are_text_as_without_a_template() -> None:
    thought = TextDelta(1, "<think>Hm</think>", 4, parts=(AnswerPart("reasoning", "Hm"), AnswerPart("reasoning_end")))
    said = (thought, TextDelta(1, "Yes\n", 1, parts=(AnswerPart("text", "Yes\n"),)), answers.finished("stop"))
    whole = written({"prompt": "Once"}, *said).whole()
    assert (whole["content"], whole["has_new_line"]) == ("<think>Hm</think>Yes\n", True)
    made = NativeWriter({"prompt": "Once", "stream": True}, Envelope("", 0, "m"))
    streamed = events(b"".join(made.feed(0, event) for event in (answers.started(10, 4), *said)))
    assert "".join(each["content"] for each in streamed) == whole["content"]


def test_probabilities_by_which_tokens_were_drawn() -> None:
    token = TokenLogprob("b", (98,), math.log(0.25), (("b", (98,), math.log(0.25)),), ids=(7, 7))
    body = {"prompt": "Once", "n_probs": 1, "post_sampling_probs": True}
    (entry,) = written(body, answers.text("b", (token,)), answers.finished("stop")).whole()["completion_probabilities"]
    top = {"id": 7, "token": "b", "bytes": [98], "prob": pytest.approx(0.25)}
    assert entry == {**top, "top_probs": [top]}


def test_only_the_fields_that_are_wanted() -> None:
    wanted = ["content", "generation_settings/n_predict", "timings/predicted_n", "absent", "content/x"]
    body = {"prompt": "Once", "response_fields": wanted}
    made = written(body, answers.text("a"), answers.finished("stop", STATS))
    made.requests[0] = AnswerRequest(prompt="Once", limits=Limits(8))
    assert made.whole() == {"content": "a", "generation_settings/n_predict": 8, "timings/predicted_n": 3}


def test_a_prompts_progress() -> None:
    body = {"prompt": "Once", "stream": True, "return_progress": True}
    made = NativeWriter(body, Envelope("", 0, "m"))
    reported = [made.feed(0, event) for event in (answers.started(10, 4), PrefillProgress(1, 2, 0.5))]
    assert [events(each)[0]["prompt_progress"] for each in reported] == [
        {"total": 10, "cache": 4, "processed": 4, "time_ms": 0},
        {"total": 10, "cache": 4, "processed": 6, "time_ms": 500},
    ]
    del body["return_progress"]
    assert NativeWriter(body, Envelope("", 0, "m")).feed(0, answers.started(10, 4)) == b""


def test_several_answers_are_a_list_in_the_order_of_their_prompts() -> None:
    made = NativeWriter({"prompt": ["a", [5]], "n": 2}, Envelope("", 0, "m"))
    for choice, text in enumerate("wxyz"):
        for event in (answers.started(10, 4), answers.text(text), answers.finished("stop", STATS)):
            made.feed(choice, event)
    found = [(each["index"], each["prompt"], each["content"]) for each in made.whole()]
    assert found == [(0, "a", "w"), (1, "a", "x"), (2, [5], "y"), (3, [5], "z")]


def test_settings_have_the_names_of_llama_server_and_the_values_that_were_used() -> None:
    sampling = SamplingParams(
        seed=3, temperature=0.5, dry_last_n=7, order=("typical_p", "temperature"), logit_bias=((5, -math.inf),)
    )
    asked = AnswerRequest(prompt="a", sampling=sampling, limits=Limits(9, ("x",)), logprobs=2)
    found = generation_settings(asked, seed=4)
    assert (found["temperature"], found["dry_penalty_last_n"], found["samplers"]) == (0.5, 7, ["typ_p", "temperature"])
    assert (found["n_predict"], found["max_tokens"], found["stop"], found["n_probs"]) == (9, 9, ["x"], 2)
    assert (found["seed"], found["logit_bias"]) == (4, [{"token": 5, "bias": None}])
    assert json.loads(json.dumps(generation_settings(), allow_nan=False))["n_predict"] == -1

"""A stream's bytes as an engine's events: however they are cut, in both of OpenAI's protocols."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
from support.answers import accumulated
from support.remote_server import CALLS, DONE, chunk, event, told, usage

from llmrun.errors import LlmrunError
from llmrun.protocol.messages import AnswerPart, AnswerRequest, Event, Finished, Generate, Message, TextDelta, Tool
from llmrun.remote.response_decoder import AnswerDecoder, EventReader
from llmrun.remote.server import Server

SERVER = Server("http://host/v1")
CHAT = AnswerRequest((Message("user", "Hi"),), tools=(Tool("add"), Tool("now")))
TEXT = AnswerRequest(prompt="Hi")


class Ticking:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def decoded(pieces: Iterable[bytes], asked: AnswerRequest = CHAT) -> list[Event]:
    decoder, reader = AnswerDecoder(SERVER, Generate(1, asked), "m", Ticking()), EventReader(SERVER)
    events: list[Event] = [decoder.started()]
    for piece in pieces:
        for data in reader.feed(piece):
            events += decoder.feed(data)
    for data in reader.flush():
        events += decoder.feed(data)
    return [*events, *decoder.ended()]


def text_of(events: list[Event]) -> str:
    return "".join(each.text for each in events if isinstance(each, TextDelta))


def stream(*pieces: Any) -> bytes:
    """The body of what the stand-in sends."""
    return b"".join(piece for piece in pieces if isinstance(piece, bytes)).split(b"\r\n\r\n", 1)[-1]


def test_a_stream_may_be_cut_anywhere() -> None:
    dice = random.Random(1)
    whole = stream(*told(chunk(reasoning_content="Hmm."), chunk("Grüße, 🦊"), chunk("\n\nEnd")))
    expected = decoded([whole])
    for _ in range(50):
        cuts = sorted(dice.sample(range(len(whole)), 20))
        pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert decoded(pieces) == expected
    received = accumulated(expected)
    assert (received.reasoning, received.text) == ("Hmm.", "Grüße, 🦊\n\nEnd")


def test_times_and_tokens_are_of_the_pieces() -> None:
    finished = decoded([stream(*told(chunk("a"), chunk("b"), chunk("c")))])[-1]
    assert isinstance(finished, Finished)
    stats = finished.stats
    assert (stats.ttft_seconds, stats.decode_seconds, stats.itl_p50_seconds, stats.itl_p95_seconds) == (1.0, 2.0, 1, 1)
    assert (stats.prompt_tokens, stats.completion_tokens, stats.context_used) == (7, 2, 9)


def test_calls_are_parts() -> None:
    received = accumulated(decoded([stream(*CALLS)]))
    assert received.text == ""
    assert [(call.name, json.loads(call.arguments)) for call in received.calls] == [
        ("add", {"a": 1, "b": 2}),
        ("now", {}),
    ]


def test_a_call_that_was_cut_off_is_no_error() -> None:
    function = {"name": "add", "arguments": '{"a": 1'}
    events = decoded([chunk(tool_calls=[{"index": 0, "function": function}]), chunk(finish="length"), DONE])
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length"
    assert accumulated(events).calls == ()
    assert AnswerPart("call_end") not in [
        part for each in events if isinstance(each, TextDelta) for part in each.answer_parts
    ]


def test_calls_that_nobody_allowed_are_left_out() -> None:
    received = accumulated(decoded([stream(*CALLS)], AnswerRequest((Message("user", "Hi"),))))
    assert (received.text, received.calls) == ("", ())


def test_thoughts_behind_the_answer_have_no_place() -> None:
    pieces = told(chunk("Yes."), chunk(reasoning_content="Hm?"), chunk(" No."))
    assert text_of(decoded([stream(*pieces)])) == "Yes. No."


def text_chunk(text: str, **more: Any) -> bytes:
    return event({"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": None, **more}]})


def test_text_completions_and_the_stop_string() -> None:
    end = text_chunk("", finish_reason="stop", stop_reason="###")
    events = decoded([text_chunk("Once"), text_chunk(" upon"), end, usage(2, 2), DONE], TEXT)
    assert text_of(events) == "Once upon"
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, events[-1].detail) == ("stop", "###")


@pytest.mark.parametrize(
    "logprobs",
    [
        {"content": [{"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": [
            {"token": "e", "logprob": -1.0, "bytes": None}]}]},
        {"tokens": ["é"], "token_logprobs": [-0.5], "top_logprobs": [{"e": -1.0}]},
    ],
    ids=["chat", "text"],
)  # fmt: skip
def test_log_probabilities_in_both_shapes(logprobs: dict[str, Any]) -> None:
    events = decoded([text_chunk("é", logprobs=logprobs), text_chunk("", finish_reason="length"), DONE], TEXT)
    (token,) = next(each for each in events if isinstance(each, TextDelta)).logprobs
    assert (token.text, token.bytes, token.logprob, token.top) == ("é", (195, 169), -0.5, (("e", (101,), -1.0),))


@pytest.mark.parametrize("logprobs", [[], {"content": 5}, {"tokens": ["a"]}, {"content": [{"token": 1}]}, "x"])
def test_log_probabilities_in_no_shape_are_left_out(logprobs: Any) -> None:
    events = decoded([text_chunk("a", logprobs=logprobs), text_chunk("", finish_reason="stop"), DONE], TEXT)
    assert text_of(events) == "a"


def test_whatever_a_chunk_is_made_of_ends_in_one_of_our_errors_or_an_answer() -> None:
    """Every value of a good chunk replaced by every kind of JSON."""
    good = {"choices": [{"index": 0, "delta": {"content": "a", "tool_calls": [
        {"index": 0, "function": {"name": "add", "arguments": "{}"}}]}, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}},
        "error": None}  # fmt: skip
    tried = 0
    for path in paths(good):
        for value in (None, True, -1, 1e308, "x", "\ud800", [], [[]], {}, {"a": {}}):
            changed = json.loads(json.dumps(good))
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            tried += 1
            with suppress(LlmrunError):
                assert isinstance(decoded([event(changed), DONE])[-1], Finished)
    assert tried > 150


def paths(value: Any, begin: tuple[Any, ...] = ()) -> Iterable[tuple[Any, ...]]:
    """The way to each value inside."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*begin, key)
        yield from paths(inner, (*begin, key))

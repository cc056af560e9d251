"""The shapes in which servers send text, reasoning, refusals, calls and reasons of the end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.answers import accumulated
from support.remote_server import DONE, chunk

from llmrun.errors import LlmrunError
from llmrun.grammar import Grammar
from llmrun.protocol.messages import AnswerRequest, Finished, Generate, Message, Tool
from llmrun.remote.answer_shapes import REASONING_FIELDS, EndKind, RemoteCalls, end_kind, texts_of
from llmrun.remote.response_decoder import AnswerDecoder, EventReader
from llmrun.remote.server import Server

SERVER = Server("http://host/v1")
ASKED = AnswerRequest((Message("user", "Hi"),), tools=(Tool("double"), Tool("shout"), Tool("now")))


def text(value: Any) -> dict[str, Any]:
    return {"type": "text", "text": value}


def thought(value: Any) -> dict[str, Any]:
    return {"type": "thinking", "thinking": value}


def decoder_of(*chunks: bytes, asked: AnswerRequest = ASKED) -> tuple[AnswerDecoder, list[Any]]:
    decoder, reader = AnswerDecoder(SERVER, Generate(1, asked), "m"), EventReader(SERVER)
    events: list[Any] = [decoder.started()]
    for data in reader.feed(b"".join(chunks)):
        events += decoder.feed(data)
    return decoder, [*events, *decoder.ended()]


STOP = chunk(finish="stop")


@pytest.mark.parametrize(
    ("delta", "said", "reasoning", "name"),
    [
        ({"content": [text("a"), text("b")]}, "ab", "", ""),
        ({"content": text("a")}, "a", "", ""),
        ({"content": ["a", text("b")]}, "ab", "", ""),
        ({"content": [{"type": "output_text", "text": {"value": "a"}}]}, "a", "", ""),
        ({"content": [thought([text("Hm.")]), text("a")]}, "a", "Hm.", "content"),
        ({"content": [thought("Hm."), text("a")]}, "a", "Hm.", "content"),
        (
            {"content": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}]},
            "", "Hm.", "content",
        ),
        ({"content": [text("a"), {"type": "reference", "reference_ids": [1]}, {"type": "image_url"}]}, "a", "", ""),
        *(({name: "Hm.", "content": "a"}, "a", "Hm.", name) for name in REASONING_FIELDS),
        ({"reasoning": [text("Hm.")], "content": ""}, "", "Hm.", "reasoning"),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]}, "", "Hm.", "reasoning_details"),
        (
            {"reasoning": "Hm.", "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]},
            "", "Hm.", "reasoning",
        ),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "xyz"}], "content": "a"}, "a", "", ""),
        ({"content": None, "refusal": "No."}, "No.", "", ""),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No.", "", ""),
        ({"content": [[[[[[[[[[text("deep")]]]]]]]]]]}, "", "", ""),
    ],
)  # fmt: skip
def test_texts_of_every_shape(delta: dict[str, Any], said: str, reasoning: str, name: str) -> None:
    found = texts_of(delta)
    assert (found.text + found.refusal, found.reasoning, found.reasoning_name) == (said, reasoning, name)
    decoder, events = decoder_of(chunk(**{"content": None, **delta}), STOP, DONE)
    received = accumulated(events)
    assert (received.text, received.reasoning, decoder.reasoning_name) == (said, reasoning, name)


def test_tags_in_the_content_are_a_place_of_reasoning_too() -> None:
    decoder, events = decoder_of(chunk("<think>Hm.</think>\n\nYes."), STOP, DONE)
    assert (accumulated(events).reasoning, decoder.reasoning_name) == ("Hm.", "tags")


def test_a_refusal_is_no_answer_by_a_schema() -> None:
    asked = AnswerRequest((Message("user", "Hi"),), grammar=Grammar("json_schema", '{"type": "object"}'))
    with pytest.raises(LlmrunError, match=r"host refused to answer: I\'d rather not\."):
        decoder_of(chunk(refusal="I'd rather"), chunk(refusal=" not."), STOP, DONE, asked=asked)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (EndKind.WHOLE, "stop tool_calls function_call eos end_turn stop_sequence STOP completed"),
        (EndKind.LENGTH, "length max_tokens model_length MAX_TOKENS max_output_tokens"),
        (EndKind.WITHHELD, "content_filter sensitive SAFETY RECITATION PROHIBITED_CONTENT"),
        (EndKind.FAILED, "error abort cancelled network_error insufficient_system_resource MALFORMED_FUNCTION_CALL"),
        (EndKind.UNKNOWN, "whim other"),
    ],
)
def test_reasons_of_the_end(kind: EndKind, words: str) -> None:
    assert {word: end_kind(word) for word in words.split()} == dict.fromkeys(words.split(), kind)


def test_an_unknown_reason_is_noted_and_an_other_word_for_the_limit_is_the_limit() -> None:
    decoder, events = decoder_of(chunk("Yes."), chunk(finish="whim"), DONE)
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, decoder.note) == ("stop", "ended the answer with the unknown reason 'whim'")
    decoder, events = decoder_of(chunk("Yes"), chunk(finish="MAX_TOKENS"), DONE)
    assert (events[-1].reason, decoder.note) == ("length", "")


def piece(name: str | None = None, arguments: Any = None, *, index: Any = None, call_id: str = "") -> dict[str, Any]:
    given = {"name": name, "arguments": arguments}
    function = {key: value for key, value in given.items() if value is not None}
    number = {} if index is None else {"index": index}
    return {**number, **({"id": call_id} if call_id else {}), "function": function}


THREE, SIX, HO = '{"number": 3}', '{"number": 6}', '{"text": "\\"}{"}'
TWO = [("double", THREE), ("double", SIX)]
ONE = TWO[:1]
CALLS: dict[str, tuple[list[list[dict[str, Any]]], list[tuple[str, str]]]] = {
    "numbered": (
        [[piece("double", '{"num', index=0, call_id="a")], [piece("double", SIX, index=1, call_id="b")],
         [piece(arguments='ber": 3}', index=0)]],
        TWO,
    ),
    "all 0, in chunks": (
        [[piece("double", THREE, index=0, call_id="a")], [piece("double", SIX, index=0, call_id="b")]], TWO
    ),
    "all 0, in one chunk": (
        [[piece("double", THREE, index=0, call_id="a"), piece("shout", HO, index=0, call_id="b")]],
        [*ONE, ("shout", HO)],
    ),
    "all 0, in pieces": (
        [[piece("double", "", index=0, call_id="a")], [piece(arguments='{"number"', index=0)],
         [piece(arguments=": 3}", index=0)], [piece("double", "", index=0, call_id="b")],
         [piece(arguments='{"number": ', index=0)], [piece(arguments="6}", index=0)]],
        TWO,
    ),
    "all 0, without ids": ([[piece("double", THREE, index=0)], [piece("double", SIX, index=0)]], TWO),
    "all 0, one id for all": (
        [[piece("now", "", index=0, call_id="x"), piece("double", THREE, index=0, call_id="x")]], [("now", ""), *ONE]
    ),
    "the same call twice": ([[piece("double", THREE, index=0), piece("double", THREE, index=0)]], ONE * 2),
    "without numbers": ([[piece("double", THREE, call_id="a")], [piece("double", SIX, call_id="b")]], TWO),
    "without numbers, in one chunk": ([[piece("double", THREE, call_id="a"), piece("double", SIX, call_id="b")]], TWO),
    "without numbers and ids": ([[piece("double", THREE)], [piece("double", SIX)]], TWO),
    "without numbers, in pieces": (
        [[piece("double", '{"number"', call_id="a")], [piece(arguments=": 3}")],
         [piece("double", '{"num', call_id="b")], [piece(arguments='ber": 6}', call_id="b")]],
        TWO,
    ),
    "without numbers, by places": (
        [[piece("double", ""), piece("shout", "")], [piece(arguments=THREE), piece(arguments=HO)]],
        [*ONE, ("shout", HO)],
    ),
    "null for a number": ([[{**piece("double", THREE, call_id="a"), "index": None}]], ONE),
    "objects": ([[piece("double", {"number": 3}, index=0)], [piece("double", {"number": 6}, index=0)]], TWO),
    "each piece with its own id": (
        [[piece("double", '{"number"', index=0, call_id="a")], [piece(arguments=": 3", index=0, call_id="b")],
         [piece(arguments="}", index=0, call_id="c")], [piece(arguments="", index=0, call_id="d")]],
        ONE,
    ),
    "each piece with its name": (
        [[piece("double", '{"number"', index=0, call_id="a")], [piece("double", ": 3}", index=0, call_id="a")]], ONE
    ),
    "the whole again at the end": (
        [[piece("double", '{"number"', index=0, call_id="a")], [piece(arguments=": 3}", index=0)],
         [piece("double", THREE, index=0, call_id="a")]],
        ONE,
    ),
    "the whole again at the end, without ids": (
        [[piece("double", '{"number"', index=0)], [piece(arguments=": 3}", index=0)],
         [piece("double", THREE, index=0)]],
        ONE,
    ),
    "an empty object at first": (
        [[piece("double", "{}", index=0, call_id="a")], [piece(arguments=THREE, index=0)]], ONE
    ),
    "without arguments": ([[piece("now", "", index=0, call_id="a")], [piece("now", "{}", index=0, call_id="a")]],
                          [("now", "{}")]),
    "id before name": (
        [[piece("double", THREE, index=0, call_id="a")], [piece(arguments=" ", index=0, call_id="a")],
         [piece("shout", None, index=0, call_id="b")], [piece(arguments=HO, index=0)]],
        [*ONE, ("shout", HO)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_however_they_are_numbered(name: str) -> None:
    chunks, expected = CALLS[name]
    calls = RemoteCalls()
    for each in chunks:
        assert len(list(calls.add(each))) == len(each)
    assert [(call.name, call.arguments) for call in calls.all] == expected
    _, events = decoder_of(*(chunk(tool_calls=each) for each in chunks), chunk(finish="tool_calls"), DONE)
    received = accumulated(events).calls
    assert [(call.name, json.loads(call.arguments)) for call in received] == [
        (name, json.loads(arguments or "{}")) for name, arguments in expected
    ]
    assert len({call.id for call in received}) == len(expected)


def test_ids_of_calls_are_the_servers() -> None:
    _, events = decoder_of(chunk(tool_calls=[piece("now", "{}", call_id="Ab3dE6gH9")]), chunk(finish="stop"), DONE)
    assert [call.id for call in accumulated(events).calls] == ["Ab3dE6gH9"]

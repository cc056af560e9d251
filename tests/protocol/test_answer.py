"""An answer is split into the same parts in every place where its text may be cut, and accumulated again."""

from __future__ import annotations

import pytest
from support.answers import joined, sent, split, splitter_of

from llmrun.protocol.answer import ResponseAccumulator, with_beginnings
from llmrun.protocol.messages import AnswerPart, AnswerRequest, Generate, Started, TextDelta

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
ANSWER = f"<think>Not {CALL}.</think>Well.\n{CALL}"
STARTED = Started(1, 9, 0, 5, thinking_tags=("<think>", "</think>"), tool_syntax="hermes")


@pytest.mark.parametrize("cut", range(len(ANSWER)))
def test_calls_are_split_from_the_answer_but_not_from_reasoning(cut: int) -> None:
    splitter = splitter_of(STARTED)
    assert joined([*splitter.feed(ANSWER[:cut]), *splitter.feed(ANSWER[cut:]), *splitter.flush()]) == [
        AnswerPart("reasoning", f"Not {CALL}."),
        AnswerPart("reasoning_end"),
        AnswerPart("text", "Well."),
        AnswerPart("call", "f"),
        AnswerPart("arguments", "{}"),
        AnswerPart("call_end"),
    ]


def test_an_answer_without_tags_and_tools_is_text() -> None:
    splitter = splitter_of(Started(1, 9, 0, 5))
    assert joined([*splitter.feed(ANSWER), *splitter.flush()]) == [AnswerPart("text", ANSWER)]
    assert TextDelta(1, ANSWER, 1).answer_parts == (AnswerPart("text", ANSWER),)
    assert TextDelta(1, "", 1).answer_parts == ()


@pytest.mark.parametrize(("reason", "text"), [("length", "See"), ("stop", "See <tool")])
def test_the_beginning_of_a_call_is_text_only_if_the_model_ended_there(reason: str, text: str) -> None:
    assert split(STARTED, "See <tool", reason=reason).text == text


def test_calls_count_if_they_are_complete_and_the_model_ended_the_answer() -> None:
    (call,) = split(STARTED, ANSWER).calls
    assert (call.name, call.arguments) == ("f", "{}")
    assert split(STARTED, ANSWER, reason="length").calls == ()
    assert split(STARTED, ANSWER + ANSWER[-len(CALL) : -20]).calls[1:] == ()
    two = split(STARTED, f"{CALL}\n{CALL}").calls
    assert len({each.id for each in two}) == 2


def test_an_answer_is_known_before_its_end() -> None:
    received = ResponseAccumulator()
    assert (received.started, received.has_text, received.text) == (None, False, "")
    for event in [STARTED, *sent(STARTED, ["<think>Hm", ".</think>", "Yes."])][:-1]:
        received.take(event)
    assert (received.reasoning, received.text, received.finished, received.calls) == ("Hm.", "Yes.", None, ())


def test_what_an_answer_is_given_to_begin_with_is_its_first_piece() -> None:
    events = [Started(1, 9, 0, 5), TextDelta(1, "two", 1), Started(2, 9, 0, 5), TextDelta(2, "<think>b</think>c", 1)]
    asked = (AnswerRequest(begins="one "), AnswerRequest(begins="one ", begins_reasoning="a"))
    commands = [Generate(number, request) for number, request in enumerate(asked, 1)]
    heard = list(with_beginnings(commands, events))
    assert [event for event in heard if event in events] == events
    first, second = (event for event in heard if isinstance(event, TextDelta) and event not in events)
    assert (first.request, first.tokens, first.answer_parts) == (1, 0, (AnswerPart("text", "one "),))
    parts = (AnswerPart("reasoning", "a"), AnswerPart("reasoning_end"), AnswerPart("text", "one "))
    assert (second.request, second.answer_parts) == (2, parts)
    assert list(with_beginnings([Generate(1, AnswerRequest())], events[:2])) == events[:2]


def test_a_given_beginning_is_skipped_but_not_a_call_after_it() -> None:
    splitter = splitter_of(STARTED)
    splitter.skip("Let me see. <tool")
    parts = joined([*splitter.feed(CALL.removeprefix("<tool")), *splitter.flush()])
    assert parts == [AnswerPart("call", "f"), AnswerPart("arguments", "{}"), AnswerPart("call_end")]
    splitter = splitter_of(STARTED)
    splitter.skip("Let me see. <tool")
    assert joined([*splitter.feed(" box"), *splitter.flush()]) == [AnswerPart("text", " box")]

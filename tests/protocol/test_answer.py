"""An answer is split into the same parts in every place where its text may be cut, and accumulated again."""

from __future__ import annotations

import pytest
from support.answers import joined, sent, split, splitter_of

from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.messages import AnswerPart, Started, TextDelta

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

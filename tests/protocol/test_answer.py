"""An answer is split into the same parts in every place where its text may be cut, and accumulated again."""

from __future__ import annotations

import pytest
from support.answers import accumulated, joined, sent, split, splitter_of

from llmrun.protocol.answer import ResponseAccumulator, with_beginnings
from llmrun.protocol.messages import (
    AnswerPart,
    AnswerRequest,
    Finished,
    Generate,
    PartKind,
    Started,
    Stats,
    TextDelta,
    TokenLogprob,
)
from llmrun.protocol.toolcalls import HERMES

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


REASONED = (
    "I think <tool_call>.</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
REASONING = Started(1, 9, 0, 5, thinking=True, thinking_tags=("<think>", "</think>"), tool_syntax=HERMES.trigger)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_parts_and_the_whole_are_the_same_in_pieces_of_every_size(size: int) -> None:
    received = ResponseAccumulator()
    pieces = [REASONED[at : at + size] for at in range(0, len(REASONED), size)]
    parts = joined([part for event in (REASONING, *sent(REASONING, pieces)) for part in received.take(event)])
    first, second = received.calls
    assert parts == [
        AnswerPart("reasoning", "I think <tool_call>."),
        AnswerPart("reasoning_end"),
        AnswerPart("text", "Let me see."),
        AnswerPart("call", "weather", first.id),
        AnswerPart("arguments", '{"city": "Rome"}'),
        AnswerPart("call_end"),
        AnswerPart("call", "now", second.id),
        AnswerPart("arguments", "{}"),
        AnswerPart("call_end"),
    ]
    assert (received.started, received.reason, received.stop) == (REASONING, "tool_calls", "")
    assert (received.reasoning, received.text) == ("I think <tool_call>.", "Let me see.")
    assert (first.arguments, second.arguments, first.id != second.id) == ('{"city": "Rome"}', "{}", True)


def test_a_call_has_the_models_own_id_if_there_is_one() -> None:
    parts = tuple(AnswerPart("call", "now", call_id) for call_id in ("functions.now:0", ""))
    received = ResponseAccumulator()
    first, second = received.take(TextDelta(1, "", 1, parts=parts))
    assert (first.call_id, second.call_id.startswith("call")) == ("functions.now:0", True)
    assert [call.id for call in received.all_calls] == [first.call_id, second.call_id]


def test_without_tools_everything_is_text() -> None:
    received = split(REASONING._replace(tool_syntax=""), REASONED)
    assert (received.reasoning, received.text) == ("I think <tool_call>.", REASONED.partition("\n\n")[2])
    assert (received.calls, received.reason) == ((), "stop")


@pytest.mark.parametrize("reason", ["length", "stop", "repeats"])
def test_a_cut_call_ends_for_its_length_whatever_cut_it(reason: str) -> None:
    events = sent(REASONING, [REASONED[: REASONED.index('"arguments": {') + 15]], reason=reason)
    assert accumulated(events).reason == "length"


def test_reasoning_is_counted_and_only_the_text_has_log_probabilities() -> None:
    def delta(*texts: str, kind: PartKind | None = None, shown: str = "") -> TextDelta:
        tokens = tuple(TokenLogprob(text, tuple(text.encode()), -0.5, ()) for text in texts)
        return TextDelta(
            1, "".join(texts), len(texts), tokens, parts=(AnswerPart(kind, shown),) if kind is not None else ()
        )

    received = ResponseAccumulator()
    deltas = (
        delta("Hm", ".", kind="reasoning", shown="Hm."),
        delta("</think>"),
        delta("\n\n", "Hi", kind="text", shown="Hi"),
        delta(" you", "!", kind="text", shown=" you!"),
        delta("<tool_call>"),
        delta("f", kind="call", shown="f"),
        delta("{}", kind="arguments", shown="{}"),
        delta("</tool_call>", kind="call_end"),
    )
    parts = [part for event in (*deltas, Finished(1, "stop", Stats())) for part in received.take(event)]
    tokens = [token.text for part in parts if part.kind == "text" for token in part.logprobs]
    assert tokens == [token.text for token in received.text_logprobs] == ["Hi", " you", "!"]
    assert (received.reason, received.reasoning_tokens, len(received.logprobs)) == ("tool_calls", 2, 11)

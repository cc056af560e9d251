"""Text from an engine becomes thoughts, text and calls, however it is cut."""

from __future__ import annotations

import itertools

import pytest
from support.answers import sent

from llmrun.protocol.messages import AnswerPart, Finished, PartKind, Started, Stats, TextDelta, TokenLogprob
from llmrun.protocol.toolcalls import HERMES
from llmrun.server.answer_parts import (
    AnswerReader,
    AnswerText,
    CallArguments,
    CallStarted,
    Part,
    ReasoningText,
    ResponseFinished,
    ResponseStarted,
)

ANSWER = (
    "I think <tool_call>.</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
STARTED = Started(1, 9, 0, 5, thinking=True, thinking_tags=("<think>", "</think>"), tool_syntax=HERMES.trigger)


def parts_of(started: Started, size: int) -> list[Part]:
    """The parts of an answer that comes in pieces of a size, those of one part joined."""
    numbers = itertools.count(1)
    reader = AnswerReader(2, new_id=lambda: f"call_{next(numbers)}")
    pieces = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    begun, *told, ended = [part for event in (started, *sent(started, pieces)) for part in reader.read(event)]
    assert begun == ResponseStarted(2, 9, 0)
    assert isinstance(ended, ResponseFinished)
    assert ended.reason == ("tool_calls" if started.tool_syntax else "stop")
    joined: list[Part] = []
    for part in told:
        last = joined[-1] if joined else None
        if isinstance(part, (ReasoningText, AnswerText, CallArguments)) and isinstance(last, type(part)):
            joined[-1] = last._replace(text=last.text + part.text)
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_thoughts_text_and_calls(size: int) -> None:
    assert parts_of(STARTED, size) == [
        ReasoningText(2, "I think <tool_call>."),
        AnswerText(2, "Let me see."),
        CallStarted(2, 0, "call_1", "weather"),
        CallArguments(2, 0, '{"city": "Rome"}'),
        CallStarted(2, 1, "call_2", "now"),
        CallArguments(2, 1, "{}"),
    ]


def test_a_call_has_the_models_own_id_if_there_is_one() -> None:
    parts = tuple(AnswerPart("call", "now", call_id) for call_id in ("functions.now:0", ""))
    reader = AnswerReader(0, new_id=lambda: "call_1")
    calls = reader.read(TextDelta(1, "", 1, parts=parts))
    assert calls == [CallStarted(0, 0, "functions.now:0", "now"), CallStarted(0, 1, "call_1", "now")]


def test_without_tools_everything_is_text() -> None:
    thought, text = parts_of(STARTED._replace(tool_syntax=""), 5)
    assert thought == ReasoningText(2, "I think <tool_call>.")
    assert isinstance(text, AnswerText)
    assert text.text == ANSWER.partition("\n\n")[2]


@pytest.mark.parametrize("reason", ["length", "stop", "repeats"])
def test_a_cut_call_ends_for_its_length_whatever_cut_it(reason: str) -> None:
    reader = AnswerReader(0)
    events = sent(STARTED, [ANSWER[: ANSWER.index('"arguments": {') + 15]], reason=reason)
    last = [part for event in events for part in reader.read(event)][-1]
    assert isinstance(last, ResponseFinished)
    assert last.reason == "length"


def test_reasoning_is_counted_and_only_the_text_has_log_probabilities() -> None:
    def delta(*texts: str, kind: PartKind | None = None, shown: str = "") -> TextDelta:
        tokens = tuple(TokenLogprob(text, tuple(text.encode()), -0.5, ()) for text in texts)
        return TextDelta(
            1, "".join(texts), len(texts), tokens, parts=(AnswerPart(kind, shown),) if kind is not None else ()
        )

    reader = AnswerReader(0)
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
    parts = [part for event in (*deltas, Finished(1, "stop", Stats())) for part in reader.read(event)]
    tokens = [token.text for part in parts if isinstance(part, AnswerText) for token in part.logprobs]
    assert tokens == ["Hi", " you", "!"]
    assert parts[-1] == ResponseFinished(0, "tool_calls", Stats(), reasoning_tokens=2)


def test_ids_differ() -> None:
    started, reader = STARTED._replace(thinking=False), AnswerReader(0)
    events = sent(started, [ANSWER.partition("</think>")[2]])
    calls = [part for event in events for part in reader.read(event) if isinstance(part, CallStarted)]
    assert len({call.id for call in calls}) == len(calls) == 2

"""Text from an engine becomes thoughts, text and calls, however it is cut."""

from __future__ import annotations

import itertools

import pytest

from llmrun.protocol.messages import Started
from llmrun.protocol.toolcalls import HERMES
from llmrun.server.asked import CallArguments, CallBegun, Part, Text, Thought
from llmrun.server.toolcalls import PartSplitter

ANSWER = (
    "I think <tool_call>.</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
STARTED = Started(1, 9, 0, 5, thinking=True, thinking_tags=("<think>", "</think>"), tool_syntax=HERMES.name)


def parts_of(started: Started, size: int) -> list[Part]:
    """What pieces of a size mean, those of one part joined."""
    numbers = itertools.count(1)
    splitter = PartSplitter(2, started, new_id=lambda: f"call_{next(numbers)}")
    told = [part for at in range(0, len(ANSWER), size) for part in splitter.feed(ANSWER[at : at + size])]
    joined: list[Part] = []
    for part in [*told, *splitter.flush()]:
        last = joined[-1] if joined else None
        if isinstance(part, (Thought, Text, CallArguments)) and isinstance(last, type(part)):
            joined[-1] = last._replace(text=last.text + part.text)
        else:
            joined.append(part)
    assert splitter.has_called is (started.tool_syntax == HERMES.name)
    return joined


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_thoughts_text_and_calls(size: int) -> None:
    assert parts_of(STARTED, size) == [
        Thought(2, "I think <tool_call>."),
        Text(2, "Let me see."),
        CallBegun(2, 0, "call_1", "weather"),
        CallArguments(2, 0, '{"city": "Rome"}'),
        CallBegun(2, 1, "call_2", "now"),
        CallArguments(2, 1, "{}"),
    ]


def test_without_tools_everything_is_text() -> None:
    thought, text = parts_of(STARTED._replace(tool_syntax=""), 5)
    assert thought == Thought(2, "I think <tool_call>.")
    assert isinstance(text, Text)
    assert text.text == ANSWER.partition("\n\n")[2]


def test_ids_differ() -> None:
    splitter = PartSplitter(0, Started(1, 9, 0, 5, tool_syntax=HERMES.name))
    calls = [part for part in splitter.feed(ANSWER.partition("</think>")[2]) if isinstance(part, CallBegun)]
    assert len({call.id for call in calls}) == len(calls) == 2


@pytest.mark.parametrize(("is_cut_off", "shown"), [(True, "See"), (False, "See <tool")])
def test_what_begins_like_a_call_is_text_only_where_the_model_ended_there(is_cut_off: bool, shown: str) -> None:
    splitter = PartSplitter(0, Started(1, 9, 0, 5, tool_syntax=HERMES.name))
    told = [*splitter.feed("See <tool"), *splitter.flush(is_cut_off=is_cut_off)]
    assert "".join(part.text for part in told if isinstance(part, Text)) == shown

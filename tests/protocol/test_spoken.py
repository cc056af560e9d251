"""What a model says, told from its calls in every place where an answer may be cut."""

from __future__ import annotations

import pytest

from llmrun.protocol.reasoning import ReasoningKind, ReasoningPart
from llmrun.protocol.spoken import SpokenSplitter

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
ANSWER = f"<think>Not {CALL}.</think>Well.\n{CALL}"


def spoken(splitter: SpokenSplitter, *pieces: str) -> list[tuple[ReasoningKind, str]]:
    """The parts, neighbours of one kind as one."""
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    joined: list[ReasoningPart] = []
    for kind, text in (*parts, *splitter.flush()):
        if joined and joined[-1].kind is kind:
            text = joined.pop().text + text
        joined.append(ReasoningPart(kind, text))
    return [(kind, text) for kind, text in joined]


@pytest.mark.parametrize("cut", range(len(ANSWER)))
def test_calls_are_left_out_of_answers_but_not_of_thoughts(cut: int) -> None:
    splitter = SpokenSplitter(("<think>", "</think>"), tool_syntax="hermes")
    assert spoken(splitter, ANSWER[:cut], ANSWER[cut:]) == [
        (ReasoningKind.THOUGHT, f"Not {CALL}."),
        (ReasoningKind.END, ""),
        (ReasoningKind.ANSWER, "Well."),
    ]
    assert splitter.has_calls


def test_without_tools_everything_is_said() -> None:
    splitter = SpokenSplitter(())
    assert spoken(splitter, ANSWER) == [(ReasoningKind.ANSWER, ANSWER)]
    assert not splitter.has_calls

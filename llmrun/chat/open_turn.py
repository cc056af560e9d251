"""A turn that is being answered: its question, and what has come of its answer so far. Must not know models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmrun.chat.store.turns import INTERRUPTED, CallRound, Departure, Question, WindowTurn
from llmrun.protocol.messages import Event, Finished, Started, TextDelta, Tool, ToolCall
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.reasoning import split


@dataclass(slots=True)
class HeardAnswer:
    """What has come of an answer.

    Attributes:
        started: its beginning; None before that.
        pieces: of its text.
        finished: its end; None before that.
    """

    started: Started | None = None
    pieces: list[str] = field(default_factory=list)
    finished: Finished | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, TextDelta):
            self.pieces.append(event.text)
        elif isinstance(event, Finished):
            self.finished = event

    @property
    def reason(self) -> str:
        """Why it ended."""
        return self.finished.reason if self.finished else INTERRUPTED

    def parts(self, tools: Sequence[Tool]) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Its thoughts, its text, and its calls where it came to its own end."""
        if self.started is None:
            return "", "", ()
        thoughts, answer = split("".join(self.pieces), self.started.thinking_tags, inside=self.started.thinking)
        if not self.started.tool_syntax:
            return thoughts, answer, ()
        from llmrun.protocol.toolcalls import split_calls  # few chats have tools

        text, calls = split_calls(answer, self.started.tool_syntax, tools, is_cut_off=self.reason != "stop")
        return thoughts, text, calls if self.reason == "stop" else ()


@dataclass(slots=True)
class OpenTurn:
    """A question that is being answered, in several rounds where the model calls tools.

    Attributes:
        question: of the turn.
        sampling: of all rounds.
        before: the turns that the model still sees.
        departures: what left before them.
        rounds: calls and their results so far.
        thoughts: of these rounds.
        said: the text that came with the calls that have no results yet.
    """

    question: Question
    sampling: SamplingParams
    before: list[WindowTurn]
    departures: list[Departure] = field(default_factory=list)
    rounds: list[CallRound] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    said: str = ""

"""What came of one answer, for protocols that tell all of it at once.

Owns the joining of pieces; must not know any protocol.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import Stats, TokenLogprob
from llmrun.server.answer_parts import (
    AnswerText,
    CallArguments,
    CallStarted,
    Part,
    ReasoningText,
    ResponseFinished,
    ResponseStarted,
)


class AccumulatedCall(NamedTuple):
    """One call of a tool, as far as it came."""

    id: str
    name: str
    pieces: list[str]

    @property
    def arguments(self) -> str:
        """Their JSON text."""
        return "".join(self.pieces)

    def as_object(self) -> dict[str, Any] | None:
        """The arguments; None where the answer ended in the middle of them."""
        try:
            value = load_json(self.arguments)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


class AccumulatedAnswer:
    """An answer so far.

    Attributes:
        begun: None before the prompt was accepted.
        ended: None before it ended.
    """

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self.calls: list[AccumulatedCall] = []
        self.logprobs: list[TokenLogprob] = []
        self.begun: ResponseStarted | None = None
        self.ended: ResponseFinished | None = None

    def add(self, part: Part) -> None:
        """One more part."""
        match part:
            case ResponseStarted():
                self.begun = part
            case ReasoningText():
                self._thoughts.append(part.text)
            case AnswerText():
                self._texts.append(part.text)
                self.logprobs += part.logprobs
            case CallStarted():
                self.calls.append(AccumulatedCall(part.id, part.name, []))
            case CallArguments():
                self.calls[part.call].pieces.append(part.text)
            case ResponseFinished():
                self.ended = part

    @property
    def thoughts(self) -> str:
        """All of them."""
        return "".join(self._thoughts)

    @property
    def text(self) -> str:
        """The answer itself."""
        return "".join(self._texts)

    @property
    def stats(self) -> Stats:
        """What it cost; nothing before its end."""
        return Stats() if self.ended is None else self.ended.stats

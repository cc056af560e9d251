"""The page's own protocol: one answer as server-sent events with all figures of the engine, and what to save of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmrun.errors import LlmrunError
from llmrun.protocol.logprobs import logprob_entries
from llmrun.server import sse
from llmrun.server.answer_parts import (
    AccumulatedAnswer,
    AnswerText,
    Part,
    ReasoningText,
    ResponseFinished,
    ResponseStarted,
)
from llmrun.server.protocols.openai import error_body


class PageWriter:
    """Writes the events of one answer, and accumulates it.

    Args:
        begins: text that the answer was given to begin with.

    Attributes:
        answer: as far as it was received.
        failed: the stream ended with an error.
        notes: lines about images that are left out.
    """

    media_type = sse.EVENT_STREAM

    def __init__(self, begins: str = "") -> None:
        self.answer = AccumulatedAnswer()
        self.failed = False
        self.notes: list[str] = []
        self._begins = begins

    @property
    def text(self) -> str:
        """The answer without its reasoning."""
        return self._begins + self.answer.text

    def begin(self) -> bytes:
        """See answer_parts.Writer."""
        return b"".join(sse.event({"text": note}, "note") for note in self.notes)

    def feed(self, part: Part) -> bytes:
        """See answer_parts.Writer."""
        self.answer.add(part)
        match part:
            case ResponseStarted():
                return sse.event({"prompt_tokens": part.prompt_tokens, "cached_tokens": part.cached_tokens}, "started")
            case AnswerText(logprobs=()):
                return sse.event({"text": part.text}, "text")
            case AnswerText():
                return sse.event({"text": part.text, "tokens": logprob_entries(part.logprobs)}, "text")
            case ReasoningText():
                return sse.event({"text": part.text}, "reasoning")
            case ResponseFinished():
                return sse.event({"reason": part.reason, **asdict(part.stats)}, "finished")
        return b""  # calls are sent when they are whole, see answering.py

    def end(self) -> bytes:
        """See answer_parts.Writer."""
        return b""

    def error(self, error: LlmrunError) -> bytes:
        """See answer_parts.Writer."""
        self.failed = True
        return sse.event(error_body(error, error.http_status)["error"], "failed")

    def whole(self) -> dict[str, Any]:
        """See answer_parts.Writer."""
        return {"text": self.text}

"""The page's own protocol: one answer as server-sent events with all figures of the engine, and what to save of it."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from llmrun.errors import LlmrunError
from llmrun.protocol.logprobs import logprob_entries
from llmrun.protocol.messages import Stats
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

_PACE_SECONDS = 0.1


class PageWriter:
    """Writes the events of one answer, and accumulates it.

    Text within _PACE_SECONDS of the last text sent is held until the next part: the page draws no more often, and each
    chunk wakes three processes of a browser, which shares the processor with the engine.

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
        self._waiting = bytearray()
        self._due = 0.0  # when text is sent again
        self._began = time.monotonic()
        self._first = self._last = 0.0  # times of text
        self._n_pieces = 0  # of text, each a token as a rule

    @property
    def text(self) -> str:
        """The answer without its reasoning."""
        return self._begins + self.answer.text

    @property
    def stats(self) -> Stats:
        """The figures as far as they are known of an answer without an end."""
        started = self.answer.started
        prompt, cached = (started.prompt_tokens, started.cached_tokens) if started is not None else (0, 0)
        return Stats(
            prompt_tokens=prompt,
            reused_tokens=cached,
            completion_tokens=self._n_pieces,
            decode_seconds=self._last - self._first,
            ttft_seconds=self._first - self._began if self._n_pieces else 0.0,
            context_used=prompt + self._n_pieces,
        )

    def begin(self) -> bytes:
        """See answer_parts.Writer."""
        return b"".join(sse.event({"text": note}, "note") for note in self.notes)

    def feed(self, part: Part) -> bytes:
        """See answer_parts.Writer."""
        self.answer.add(part)
        if isinstance(part, (AnswerText, ReasoningText)):
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._n_pieces += len(part.logprobs) or 1 if isinstance(part, AnswerText) else 1
        match part:
            case ResponseStarted():
                return sse.event({"prompt_tokens": part.prompt_tokens, "cached_tokens": part.cached_tokens}, "started")
            case AnswerText(logprobs=()):
                return self._paced(sse.event({"text": part.text}, "text"))
            case AnswerText():
                return self._paced(sse.event({"text": part.text, "tokens": logprob_entries(part.logprobs)}, "text"))
            case ReasoningText():
                return self._paced(sse.event({"text": part.text}, "reasoning"))
            case ResponseFinished():
                return self.end() + sse.event({"reason": part.reason, **asdict(part.stats)}, "finished")
        return b""  # calls are sent when they are whole, see answering.py

    def _paced(self, event: bytes) -> bytes:
        self._waiting += event
        now = time.monotonic()
        if now < self._due:
            return b""
        self._due = now + _PACE_SECONDS
        return self.end()

    def end(self) -> bytes:
        """See answer_parts.Writer."""
        waiting, self._waiting = bytes(self._waiting), bytearray()
        return waiting

    def error(self, error: LlmrunError) -> bytes:
        """See answer_parts.Writer."""
        self.failed = True
        return self.end() + sse.event(error_body(error, error.http_status)["error"], "failed")

    def whole(self) -> dict[str, Any]:
        """See answer_parts.Writer."""
        return {"text": self.text}

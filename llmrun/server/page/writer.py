"""The page's own protocol: one answer as server-sent events with all figures of the engine, and what to save of it."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from llmrun.errors import LlmrunError
from llmrun.protocol.logprobs import logprob_entries
from llmrun.protocol.messages import AnswerPart, Stats
from llmrun.server.answer import AnswerWriter, sse_event
from llmrun.server.protocols.openai import error_body

_PACE_SECONDS = 0.1


class PageWriter(AnswerWriter):
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

    def __init__(self, begins: str = "") -> None:
        super().__init__()
        (self.answer,) = self.answers
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
        prompt, cached = (started.prompt_tokens, started.reused_tokens) if started is not None else (0, 0)
        return Stats(
            prompt_tokens=prompt,
            reused_tokens=cached,
            completion_tokens=self._n_pieces,
            decode_seconds=self._last - self._first,
            ttft_seconds=self._first - self._began if self._n_pieces else 0.0,
            context_used=prompt + self._n_pieces,
        )

    def begin(self) -> bytes:
        return b"".join(sse_event({"text": note}, "note") for note in self.notes)

    def started(self, choice: int) -> bytes:
        started = self.answer.started
        assert started is not None
        return sse_event({"prompt_tokens": started.prompt_tokens, "cached_tokens": started.reused_tokens}, "started")

    def part(self, choice: int, part: AnswerPart) -> bytes:
        if part.kind not in ("text", "reasoning"):
            return b""  # calls are sent when they are whole, see _rounds()
        self._last = time.monotonic()
        self._first = self._first or self._last
        self._n_pieces += len(part.logprobs) or 1
        tokens = {"tokens": logprob_entries(part.logprobs)} if part.logprobs else {}
        self._waiting += sse_event({"text": part.text, **tokens}, part.kind)
        if self._last < self._due:
            return b""
        self._due = self._last + _PACE_SECONDS
        return self.end()

    def finished(self, choice: int) -> bytes:
        return self.end() + sse_event({"reason": self.answer.reason, **asdict(self.answer.stats)}, "finished")

    def end(self) -> bytes:
        waiting, self._waiting = bytes(self._waiting), bytearray()
        return waiting

    def error(self, error: LlmrunError) -> bytes:
        self.failed = True
        return self.end() + sse_event(error_body(error, error.http_status)["error"], "failed")

    def whole(self) -> dict[str, Any]:
        return {"text": self.text}

"""A client of no engine: every answer comes at once, and takes its time by a clock of its own.

Owns that clock and the answers; must not know what is made of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from llmrun.errors import LlmrunError
from llmrun.protocol.messages import AnswerRequest, Command, Event, Finished, Generate, Stats, TextDelta
from llmrun.runner.requests import Put

MS = 1_000_000
GAPS = (10 * MS, 20 * MS, 70 * MS)


class ScriptedClient:
    """Each answer: a first token after 400 ms, then one after each of GAPS; 25 of its prompt's 100 tokens were known.

    Args:
        error: what ends all answers behind the first so many.
    """

    def __init__(self, error: LlmrunError | None = None, after: int = 0) -> None:
        self.asked: list[AnswerRequest] = []
        self.is_closed = False
        self._now, self._error, self._after = 0, error, after
        self.next_request = itertools.count(1).__next__

    def perf_counter_ns(self) -> int:
        return self._now

    def submit(self, command: Command) -> Iterator[Event]:
        return iter(())

    def listen(self, command: Generate, put: Put) -> None:
        self.asked.append(command.asked)
        if self._error is not None and len(self.asked) > self._after:
            put(self._error)
        else:
            for gap in (400 * MS, *GAPS):
                self._now += gap
                put(TextDelta(command.request, "x", 1))
            put(Finished(command.request, "length", Stats(100, 25, completion_tokens=1 + len(GAPS))))
        put(None)

    def close(self) -> None:
        self.is_closed = True

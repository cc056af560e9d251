"""Where rows go that are done, whoever answered them: into the file of answers, and into the count.

Owns how far a batch is; must not know terminals or engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from llmrun.batch.answers import FinishedRow, result_of
from llmrun.batch.results import ResultFile
from llmrun.batch.rows import Row
from llmrun.errors import LlmrunError
from llmrun.protocol.energy import Counters, Energy


class RowSink(Protocol):
    """What those who answer rows report to."""

    def begin(self) -> None:
        """An engine is loaded."""

    def meter(self, energy: Energy) -> None:
        """What counts the joules, where that is known: before begin()."""

    def put(self, done: FinishedRow) -> None:
        """A row is done."""

    def died(self) -> None:
        """An engine died."""

    def note(self, text: str) -> None:
        """What the user should know."""


@dataclass(slots=True)
class BatchProgress:
    """What has been done so far, of how many rows. Tokens are those of this run alone.

    Attributes:
        total: rows of the input.
        before: of them, that had their line when this run began.
        failed_before: of those, that had an error.
        done: that got it since, failed ones too.
        failed: of those.
        prompt_tokens, cached_tokens, completion_tokens: of those that did not fail.
        deaths: engines that died.
        seconds: since the engine was loaded.
        joules: of the machine since then; None where nobody counts them.
    """

    total: int
    before: int = 0
    failed_before: int = 0
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    deaths: int = 0
    seconds: float = 0.0
    joules: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of answers."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """By the rows of this run; None before the first."""
        left = self.total - self.before - self.done
        return self.seconds / self.done * left if self.done else None


class Ledger:
    """The sink that writes.

    Args:
        results: get what comes.
        tally: is kept up to date.
        on_progress: called as rows are done.
        on_note: gets what the user should know.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        results: ResultFile,
        tally: BatchProgress,
        on_progress: Callable[[], None] = lambda: None,
        on_note: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._results, self._tally = results, tally
        self._on_progress, self._clock = on_progress, clock
        self.note = on_note
        self._began: float | None = None
        self._energy: Energy | None = None
        self._used: Counters = {}

    def meter(self, energy: Energy) -> None:
        """See Sink."""
        self._energy = energy

    def begin(self) -> None:
        """Time and energy count from the first engine on."""
        if self._began is None:
            self._began = self._clock()
            self._used = self._energy.read() if self._energy is not None else {}

    def refuse(self, broken: Iterable[tuple[Row, LlmrunError]]) -> None:
        """Write the errors of rows that can't be asked."""
        for row, error in broken:
            self.put(FinishedRow(row.number, "", result_of(row, (), error, f"row-{row.number}")))

    def put(self, done: FinishedRow) -> None:
        """Write a row's line. Raises as ResultFile.add()."""
        tally = self._tally
        self._results.add(done.row, done.key, done.result)
        tally.done += 1
        tally.failed += done.failed
        tally.prompt_tokens += done.prompt_tokens
        tally.cached_tokens += done.cached_tokens
        tally.completion_tokens += done.completion_tokens
        tally.seconds = self._clock() - self._began if self._began is not None else 0.0
        tally.joules = self._energy.since(self._used) if self._energy is not None else None
        self._on_progress()

    def died(self) -> None:
        """Only counted: whose fault it was is in the answers."""
        self._tally.deaths += 1

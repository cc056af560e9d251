"""The progress of a batch: finished rows are written to the file of answers and counted.

Must not know terminals or engines.
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
from llmrun.protocol.answer import ResponseAccumulator


class RowSink(Protocol):
    """A receiver of finished rows and events."""

    def begin(self) -> None:
        """Note that an engine is loaded."""

    def put(self, done: FinishedRow) -> None:
        """Take a finished row."""

    def died(self) -> None:
        """Count an engine that died."""

    def note(self, text: str) -> None:
        """Show a note to the user."""


_LEAST_ROWS = 4  # of this run, before the time left is estimated


@dataclass(slots=True)
class BatchProgress:
    """The counts of a batch."""

    total: int  # rows of the input
    before: int = 0  # rows with a line at the start of this run
    failed_before: int = 0  # of these, with an error
    done: int = 0  # rows of this run, failed ones included
    failed: int = 0  # of these
    prompt_tokens: int = 0  # these are of the rows of this run that did not fail
    cached_tokens: int = 0
    completion_tokens: int = 0
    deaths: int = 0  # engines that died
    parallel: int = 1  # rows that are answered at once
    seconds: float = 0.0  # since the engine was loaded

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the rows of this run; None before enough of them ended.

        The first of parallel rows end together late, or one of them early: neither gives a pace.
        """
        left = self.total - self.before - self.done
        return self.seconds / self.done * left if self.done >= max(_LEAST_ROWS, 2 * self.parallel) else None


class Ledger:
    """The RowSink that writes and counts.

    Args:
        on_progress: called after each row.
        on_note: shows a note to the user.
        clock: monotonic seconds.
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
        self._started_at: float | None = None

    def begin(self) -> None:
        """Start to count time, at the first engine."""
        if self._started_at is None:
            self._started_at = self._clock()

    def refuse(self, broken: Iterable[tuple[Row, LlmrunError]]) -> None:
        """Write the errors of invalid rows."""
        for row, error in broken:
            self.put(FinishedRow(row.number, "", result_of(row, ResponseAccumulator(), error, f"row-{row.number}")))

    def put(self, done: FinishedRow) -> None:
        """Write a row's line. Raises as ResultFile.add()."""
        tally = self._tally
        self._results.add(done.row, done.key, done.result)
        tally.done += 1
        tally.failed += done.failed
        tally.prompt_tokens += done.prompt_tokens
        tally.cached_tokens += done.cached_tokens
        tally.completion_tokens += done.completion_tokens
        tally.seconds = self._clock() - self._started_at if self._started_at is not None else 0.0
        self._on_progress()

    def died(self) -> None:
        """Count an engine that died; the line of the row at fault has the error."""
        self._tally.deaths += 1

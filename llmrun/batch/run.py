"""A batch run with one engine, as many rows in parallel as it has sequences; its progress is written and counted.

Rows of an engine that died are sent again. The engine's loop does the batching: it always has a few more rows than
sequences, so that it never waits for the front."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Protocol

from llmrun.batch.results import ResultFile
from llmrun.batch.rows import FinishedRow, PendingRow, Row, result_of, row_done
from llmrun.errors import EngineCrashedError, LlmrunError, UsageError
from llmrun.model import Model
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.messages import Event, Generate
from llmrun.runner.client import EngineClient


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


AHEAD = 8
"""Number of rows queued in the engine, which starts with the one that has the longest cached prefix."""


class RowAnswer:
    """The answer to a running row. put() is called by the reading thread, everything else by the waiting one."""

    def __init__(self, todo: PendingRow, finished: SimpleQueue[RowAnswer | None]) -> None:
        self.todo = todo
        self.received = ResponseAccumulator()
        self.error: LlmrunError | None = None
        self._finished = finished

    def put(self, event: Event | LlmrunError | None) -> None:
        if event is None:
            self._finished.put(self)
        elif isinstance(event, LlmrunError):
            self.error = event
        else:
            self.received.take(event)


class BatchRun:
    """A run of a batch, through one engine after the other if engines die.

    Args:
        model: planned for the number of parallel rows; not started.
        sink: gets the results, in the running thread.
        start: starts an engine for the model.
    """

    def __init__(
        self,
        model: Model,
        sink: RowSink,
        start: Callable[[Model], EngineClient] = lambda model: EngineClient(model.launch_engine()),
    ) -> None:
        self._model, self._sink, self._start = model, sink, start
        self._waiting: deque[PendingRow] = deque()
        self._stays = False  # rows may be added
        self._finished: SimpleQueue[RowAnswer | None] = SimpleQueue()
        self._suspects = 0  # number of first waiting rows that were in an engine that died: each runs alone

    def add(self, todo: Iterable[PendingRow]) -> None:
        """Add rows to a run() that stays. Thread-safe."""
        self._waiting.extend(todo)
        self._finished.put(None)

    def run(self, todo: Iterable[PendingRow] = (), *, stays: bool = False) -> None:
        """Answer all rows, in this order; a failed row gets its error as its result.

        Args:
            stays: never return, since rows may be added.

        Raises:
            LlmrunError: the model can't be loaded, or the sink can't write a row.
        """
        self._waiting.extend(todo)
        self._stays = stays
        while self._waiting or self._stays:
            client = self._start(self._model)
            try:
                client.load(replace(self._model.load, throughput=True))
                self._sink.begin()
                self._with_engine(client, self._waiting)
            finally:
                client.close()

    def _with_engine(self, client: EngineClient, waiting: deque[PendingRow]) -> None:
        """Answer rows until the engine dies. Its rows are requeued, each to run alone, which finds the cause."""
        running: dict[int, RowAnswer] = {}
        lost: list[PendingRow] = []
        while running or ((waiting or self._stays) and not lost):
            limit = 1 if self._suspects else self._model.load.n_seq_max + AHEAD
            while waiting and len(running) < limit and not lost:
                answer = RowAnswer(waiting.popleft(), self._finished)
                running[answer.todo.row.number] = answer
                completion = answer.todo.completion
                try:  # with the model's advised sampling where the row sets nothing
                    request = replace(completion.request, sampling=self._model.sampling(completion.sampling)[0])
                    request = self._model.spec.modelfile.complete(request)
                    client.listen(Generate(client.next_request(), request), answer.put)
                except UsageError as error:  # the row is too long for the pipe, or has invalid sampling
                    answer.put(error)
                    answer.put(None)
            finished = self._finished.get()
            if finished is None:
                continue
            is_alone = len(running) == 1 and not lost
            del running[finished.todo.row.number]
            if isinstance(finished.error, EngineCrashedError) and not is_alone:
                lost.append(finished.todo)
                continue
            self._suspects = max(self._suspects - 1, 0)
            if isinstance(finished.error, EngineCrashedError):
                self._sink.died()
            self._sink.put(row_done(finished.todo, finished.received, finished.error))
            if isinstance(finished.error, EngineCrashedError):
                return
        if lost:
            self._sink.died()
            self._suspects = len(lost)
            waiting.extendleft(reversed(lost))

"""Answers the rows of a batch with one engine, as many in parallel as it has sequences.

Resends the rows of an engine that died; must not know terminals or files. The engine's loop does the batching: it
always has a few more rows than sequences, so that it never waits for the front.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from queue import SimpleQueue

from llmrun.batch.answers import row_done
from llmrun.batch.ledger import RowSink
from llmrun.batch.rows import PendingRow
from llmrun.errors import EngineCrashedError, LlmrunError, UsageError
from llmrun.model import Model
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.messages import Event, Generate
from llmrun.runner.client import EngineClient

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

"""Asks one engine for all rows of a batch, as many side by side as it has sequences, and hands on what comes.

Owns the order of the work, and what becomes of rows whose engine dies; must not know terminals or files. The loop in
the engine does the batching: it always has a few more rows than sequences, so that none waits for this side.
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
from llmrun.protocol.messages import AnswerRequest, Event, Generate
from llmrun.runner.client import Client
from llmrun.server.answer_parts import AnswerReader, CompletionRequest, Part

AHEAD = 8
"""Rows that wait in the engine: it takes the one first whose prompt is known best."""


class RowAnswer:
    """One row on its way. put() is called by the thread that reads, all else by the one that waits."""

    def __init__(self, todo: PendingRow, ended: SimpleQueue[RowAnswer | None]) -> None:
        self.todo = todo
        self.parts: list[Part] = []
        self.error: LlmrunError | None = None
        self._ended = ended
        self._reader = AnswerReader(0)

    def put(self, event: Event | LlmrunError | None) -> None:
        if event is None:
            self._ended.put(self)
        elif isinstance(event, LlmrunError):
            self.error = event
        else:
            self.parts += self._reader.read(event)


class BatchRun:
    """All that is asked, on its way through one engine after the other.

    Args:
        model: planned for as many sequences as are to run side by side; not started.
        sink: gets what comes, in the thread that runs.
        start: starts an engine for the model.
    """

    def __init__(
        self,
        model: Model,
        sink: RowSink,
        start: Callable[[Model], Client] = lambda model: Client(model.launch_engine()),
    ) -> None:
        self._model, self._sink, self._start = model, sink, start
        self._waiting: deque[PendingRow] = deque()
        self._stays = False  # more rows may come
        self._ended: SimpleQueue[RowAnswer | None] = SimpleQueue()
        self._suspects = 0  # first rows of those that wait, which were in an engine that died: each is asked alone

    def add(self, todo: Iterable[PendingRow]) -> None:
        """More rows, for a run() that stays. Safe from any thread."""
        self._waiting.extend(todo)
        self._ended.put(None)

    def run(self, todo: Iterable[PendingRow] = (), *, stays: bool = False) -> None:
        """Answer all rows, in this order; what can't be answered gets its error as its result.

        Args:
            stays: it never returns, because more rows may come.

        Raises:
            LlmrunError: the model can't be loaded, or the sink can't take a row. What came before is in it.
        """
        self._waiting.extend(todo)
        self._stays = stays
        while self._waiting or self._stays:
            client = self._start(self._model)
            try:
                for _ in client.submit(replace(self._model.load, throughput=True)):
                    pass
                self._sink.begin()
                self._with_engine(client, self._waiting)
            finally:
                client.close()

    def _with_engine(self, client: Client, waiting: deque[PendingRow]) -> None:
        """As far as one engine lives. Whose engine died waits again: alone, to see whose fault it was."""
        inside: dict[int, RowAnswer] = {}
        lost: list[PendingRow] = []
        while inside or ((waiting or self._stays) and not lost):
            most = 1 if self._suspects else self._model.load.n_seq_max + AHEAD
            while waiting and len(inside) < most and not lost:
                answer = RowAnswer(waiting.popleft(), self._ended)
                inside[answer.todo.row.number] = answer
                try:
                    client.listen(Generate(client.next_request(), self._request(answer.todo.asked)), answer.put)
                except UsageError as error:  # the row is too long for the pipe, or has invalid sampling
                    answer.put(error)
                    answer.put(None)
            ended = self._ended.get()
            if ended is None:
                continue
            alone = len(inside) == 1 and not lost
            del inside[ended.todo.row.number]
            if isinstance(ended.error, EngineCrashedError) and not alone:
                lost.append(ended.todo)
                continue
            self._suspects = max(self._suspects - 1, 0)
            if isinstance(ended.error, EngineCrashedError):
                self._sink.died()
            self._sink.put(row_done(ended.todo, ended.parts, ended.error))
            if isinstance(ended.error, EngineCrashedError):
                return
        if lost:
            self._sink.died()
            self._suspects = len(lost)
            waiting.extendleft(reversed(lost))

    def _request(self, asked: CompletionRequest) -> AnswerRequest:
        """What the engine is asked, with the model's advised sampling under the row's."""
        return replace(asked.request, sampling=self._model.sampling(asked.sampling)[0])

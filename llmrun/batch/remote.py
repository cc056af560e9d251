"""A far server, for the rows of a batch.

Owns how many rows it is asked at once, and what becomes of them when it can't be reached; must not know terminals or
where answers go. A row that the server refuses or answers wrongly gets that as its result. A server that can't answer
just now is asked again; when it stays so the batch ends, and the rows it owes have no line, so that the same command
asks them again.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from queue import SimpleQueue

from llmrun.batch.answers import row_done
from llmrun.batch.ledger import RowSink
from llmrun.batch.plan import BatchPlan, EngineDescription, RowRequirements
from llmrun.batch.rows import PendingRow
from llmrun.batch.run import RowAnswer
from llmrun.errors import LoginRequiredError, ModelNotFoundError, UnavailableError, UsageError
from llmrun.models.download.transfer import RetryPolicy
from llmrun.protocol.messages import Generate
from llmrun.protocol.params import resolve_sampling
from llmrun.remote.client import PATIENT, RemoteClient
from llmrun.remote.request_body import require_told
from llmrun.remote.server import ServedModel, Server
from llmrun.server.answer_parts import Part, ResponseFinished, ResponseStarted

USUAL_PARALLEL = 32
"""Rows at once where nobody says: most servers run so many side by side, or let them wait."""
_TRIES = 3
_FATAL = (LoginRequiredError, ModelNotFoundError)  # what one row meets, all would


class RemoteEngine:
    """An Answering.

    Args:
        parallel: rows at once; None is USUAL_PARALLEL.
        patience: with the server.
        sleep: waits for seconds.
    """

    def __init__(
        self,
        server: Server,
        model: ServedModel,
        parallel: int | None,
        patience: RetryPolicy = PATIENT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server, self._model = server, model
        self._parallel = parallel or USUAL_PARALLEL
        self._patience, self._sleep = patience, sleep
        self._ended: SimpleQueue[RowAnswer | None] = SimpleQueue()

    def find(self, need: RowRequirements) -> EngineDescription:
        """See Answering."""
        self._parallel = min(self._parallel, max(need.rows, 1))
        name = f"{self._server.url} {self._model.name}"
        return EngineDescription(self._model.name, name, has_template=True, parallel=self._parallel)

    def seconds(self, plan: BatchPlan) -> float | None:
        """See Answering: nobody here knows the machine."""
        return None

    def run(self, todo: Iterable[PendingRow], sink: RowSink) -> None:
        """See Answering.

        Raises:
            UnavailableError: the server can't be reached, or does not answer any more.
            LoginRequiredError, ModelNotFoundError: it answers nothing at all.
        """
        waiting = deque(todo)
        losses: Counter[int] = Counter()  # number of a row -> how often its answer was lost while others came
        fruitless = 0
        with closing(RemoteClient(self._server, self._model, self._patience, sink.note)) as client:
            sink.begin()
            while waiting:
                lost, n_done = self._round(client, waiting, sink)
                fruitless = 0 if n_done else fruitless + 1
                if lost and fruitless >= _TRIES:
                    raise lost[0].error or UnavailableError(f"{self._server.host} does not answer")
                losses.update(each.todo.row.number for each in lost if n_done)
                for each in reversed(lost):
                    if losses[each.todo.row.number] >= _TRIES:  # it is the row
                        sink.put(row_done(each.todo, (), each.error))
                    else:
                        waiting.appendleft(each.todo)
                if lost:
                    self._pause(lost[0], fruitless, sink)
            if client.has_usage is False:
                sink.note(f"{self._server.host} does not count tokens: pieces of text are counted in their place")

    def _round(self, client: RemoteClient, waiting: deque[PendingRow], sink: RowSink) -> tuple[list[RowAnswer], int]:
        """Ask until no row is left, or one is lost; then those on their way are waited for, and no new one is asked.

        Returns:
            The lost ones, and how many rows are done.
        """
        inside, n_done = 0, 0
        lost: list[RowAnswer] = []
        while inside or (waiting and not lost):
            while waiting and inside < self._parallel and not lost:
                self._ask(client, waiting.popleft())
                inside += 1
            answer = self._ended.get()
            assert answer is not None, "nobody adds rows"
            inside -= 1
            if isinstance(answer.error, UnavailableError):
                lost.append(answer)
            elif isinstance(answer.error, _FATAL):
                raise answer.error
            else:
                sink.put(row_done(answer.todo, _counted(answer.parts), answer.error))
                n_done += 1
        return lost, n_done

    def _ask(self, client: RemoteClient, todo: PendingRow) -> None:
        answer, sampling = RowAnswer(todo, self._ended), todo.asked.sampling
        try:
            request = replace(todo.asked.request, sampling=resolve_sampling(("row", sampling))[0])
            require_told(self._server, self._model, request, sampling)
        except UsageError as error:
            answer.put(error)
            answer.put(None)
        else:
            client.listen(Generate(client.next_request(), request), answer.put, sampling)

    def _pause(self, lost: RowAnswer, fruitless: int, sink: RowSink) -> None:
        seconds = self._patience.backoff_seconds * 2**fruitless
        sink.note(f"{lost.error}; asking again in {seconds:g} seconds")
        self._sleep(seconds)


def _counted(parts: Sequence[Part]) -> Sequence[Part]:
    """Parts of an answer whose beginning says how long the prompt is, which a server tells at the end."""
    if not parts or not isinstance(parts[0], ResponseStarted) or not isinstance(parts[-1], ResponseFinished):
        return parts
    stats = parts[-1].stats
    return [ResponseStarted(parts[0].choice, stats.prompt_tokens, stats.reused_tokens), *parts[1:]]

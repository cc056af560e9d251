"""Answerers of the rows of a batch: the engine of this machine, or a remote server.

A remote server gets a limited number of requests in parallel. A rejected row, or one with an invalid answer, gets the
error as its result. Rows are retried while the server is unavailable; if it stays so the batch ends, and the same
command continues with the rows that have no line."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import closing, suppress
from dataclasses import replace
from queue import SimpleQueue

from llmrun.batch.plan import BatchPlan, EngineDescription, RowRequirements
from llmrun.batch.rows import PendingRow, row_done
from llmrun.batch.run import BatchRun, RowAnswer, RowSink
from llmrun.config import load_settings
from llmrun.errors import LlmrunError, LoginRequiredError, ModelNotFoundError, UnavailableError, UsageError
from llmrun.gguf.pooling import refuse_answers
from llmrun.model import Model
from llmrun.models.download.transfer import RetryPolicy
from llmrun.planning.hardware import this_machine
from llmrun.planning.predict import predict, step_seconds, tensor_types, work_of
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.speed import speed_of
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.messages import Generate
from llmrun.protocol.params import resolve_sampling
from llmrun.remote.client import PATIENT, RemoteClient
from llmrun.remote.request_body import require_told
from llmrun.remote.server import ServedModel, Server

MOST_PARALLEL = 64
"""Default maximum of parallel rows: with more, a step is bound by arithmetic, and its time grows with the rows."""


class LocalEngine:
    """A RowAnswerer with a local model.

    Args:
        prepared: plans the load of the model, as model.loading.prepare().
        parallel: number of parallel rows; None: as many as fit.
    """

    def __init__(
        self,
        prepared: Callable[[LoadPreferences], Model],
        preferences: LoadPreferences,
        parallel: int | None,
    ) -> None:
        self._prepared, self._preferences, self._parallel = prepared, preferences, parallel
        self.model: Model

    def find(self, need: RowRequirements) -> EngineDescription:
        self.model = model = self._planned(need)
        refuse_answers(model.header)
        adapters = [(adapter.name, adapter.scale) for adapter in model.adapters]
        return EngineDescription(
            model.spec.name,
            f"{model.path.name} {model.path.stat().st_size} {adapters}",
            model.header.chat_template is not None,
            model.load.n_seq_max,
            model.plan.notes,
        )

    def _planned(self, need: RowRequirements) -> Model:
        """Return the model, planned for as many rows of usual length as the KV cache holds."""
        count = self._parallel or max(1, min(MOST_PARALLEL, need.rows))
        while True:
            model = self._prepared(replace(self._preferences, parallel=count))
            if self._parallel or count == 1 or model.load.n_cells >= count * min(need.tokens, model.load.n_ctx):
                return model
            count = max(1, count // 2)

    def seconds(self, plan: BatchPlan) -> float | None:
        """Estimate from the speed of ggml's kernels on this machine, which is measured if unknown."""
        model, answers, settings = self.model, plan.most_answer_tokens, load_settings()
        if answers is None or not plan.todo or model.plan.vram_bytes:
            return None  # the speed of GPU kernels is unknown
        with suppress(LlmrunError):
            types = tensor_types(model.header.tensors)
            speed = speed_of(this_machine(), types, settings.state_dir)
            work, n_rows = work_of(model.header), len(plan.todo)
            rows = min(plan.parallel, n_rows)
            usual = predict(work, speed, prompt=plan.prompt_tokens // n_rows)
            depth = (plan.prompt_tokens + answers // 2) // n_rows
            prefill = (plan.prompt_tokens - plan.shared_tokens) / usual.prefill_rate
            return prefill + answers / rows * step_seconds(work, speed, rows, depth=depth)
        return None

    def run(self, todo: Iterable[PendingRow], sink: RowSink) -> None:
        BatchRun(self.model, sink).run(todo)


USUAL_PARALLEL = 32
"""Default number of parallel requests: servers run that many in parallel, or queue them."""
_TRIES = 3
_FATAL = (LoginRequiredError, ModelNotFoundError)  # errors that all rows would get


class RemoteEngine:
    """A RowAnswerer with a remote model.

    Args:
        parallel: number of parallel requests; None: USUAL_PARALLEL.
        sleep: waits for seconds.
        yielding: fields of presets, left out where the server does not support them.
    """

    def __init__(
        self,
        server: Server,
        model: ServedModel,
        parallel: int | None,
        patience: RetryPolicy = PATIENT,
        sleep: Callable[[float], None] = time.sleep,
        *,
        yielding: Collection[str] = (),
    ) -> None:
        self._server, self._model = server, model
        self._parallel = parallel or USUAL_PARALLEL
        self._patience, self._sleep = patience, sleep
        self._yielding = yielding
        self._finished: SimpleQueue[RowAnswer | None] = SimpleQueue()

    def find(self, need: RowRequirements) -> EngineDescription:
        self._parallel = min(self._parallel, max(need.rows, 1))
        name = f"{self._server.url} {self._model.name}"
        return EngineDescription(self._model.name, name, has_template=True, parallel=self._parallel)

    def seconds(self, plan: BatchPlan) -> float | None:
        """Return None: the server's speed is unknown."""
        return None

    def run(self, todo: Iterable[PendingRow], sink: RowSink) -> None:
        """Answer all rows.

        Raises:
            UnavailableError: the server is unavailable.
            LoginRequiredError, ModelNotFoundError: it rejects every row.
        """
        waiting = deque(todo)
        losses: Counter[int] = Counter()  # number of a row -> times that its answer was lost while others arrived
        n_failures = 0  # rounds in a row without any answer
        with closing(RemoteClient(self._server, self._model, self._patience, sink.note)) as client:
            sink.begin()
            while waiting:
                lost, n_done = self._round(client, waiting, sink)
                n_failures = 0 if n_done else n_failures + 1
                if lost and n_failures >= _TRIES:
                    raise lost[0].error or UnavailableError(f"{self._server.host} does not answer")
                losses.update(lost_row.todo.row.number for lost_row in lost if n_done)
                for lost_row in reversed(lost):
                    if losses[lost_row.todo.row.number] >= _TRIES:  # the row is the cause
                        sink.put(row_done(lost_row.todo, lost_row.received, lost_row.error))
                    else:
                        waiting.appendleft(lost_row.todo)
                if lost:
                    seconds = self._patience.backoff_seconds * 2**n_failures
                    sink.note(f"{lost[0].error}; retrying in {seconds:g} seconds")
                    self._sleep(seconds)
            if client.has_usage is False:
                sink.note(f"{self._server.host} reports no token counts: pieces of text are counted instead")

    def _round(self, client: RemoteClient, waiting: deque[PendingRow], sink: RowSink) -> tuple[list[RowAnswer], int]:
        """Send rows until none is left or one is lost; then wait for the running ones.

        Returns:
            The lost rows, and the number of finished rows.
        """
        n_running, n_done = 0, 0
        lost: list[RowAnswer] = []
        while n_running or (waiting and not lost):
            while waiting and n_running < self._parallel and not lost:
                self._send(client, waiting.popleft())
                n_running += 1
            answer = self._finished.get()
            assert answer is not None, "no rows are added"
            n_running -= 1
            if isinstance(answer.error, UnavailableError):
                lost.append(answer)
            elif isinstance(answer.error, _FATAL):
                raise answer.error
            else:
                _count_prompt(answer.received)
                sink.put(row_done(answer.todo, answer.received, answer.error))
                n_done += 1
        return lost, n_done

    def _send(self, client: RemoteClient, todo: PendingRow) -> None:
        answer, sampling = RowAnswer(todo, self._finished), todo.completion.sampling
        try:
            request = replace(todo.completion.request, sampling=resolve_sampling(("row", sampling))[0])
            require_told(self._server, self._model, request, sampling, yielding=self._yielding)
        except UsageError as error:
            answer.put(error)
            answer.put(None)
        else:
            client.listen(Generate(client.next_request(), request), answer.put, sampling)


def _count_prompt(answer: ResponseAccumulator) -> None:
    """Set the prompt's length, which servers report at the end, as of the start."""
    if answer.started is not None and answer.finished is not None:
        stats = answer.finished.stats
        answer.started = answer.started._replace(prompt_tokens=stats.prompt_tokens, reused_tokens=stats.reused_tokens)

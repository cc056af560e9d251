"""One node of a Ray cluster: the model found or fetched there, planned for it, and an engine that answers pieces.

Runs on the node, in Ray's process; must not know Ray, nor other nodes. Ray may start it anew at any time, so that it
remembers nothing that the driver has to know.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import llmrun
from llmrun.batch.answers import FinishedRow
from llmrun.batch.local import LocalEngine
from llmrun.batch.plan import EngineDescription, RowRequirements
from llmrun.batch.rows import PendingRow
from llmrun.batch.run import BatchRun
from llmrun.config import load_settings
from llmrun.errors import LlmrunError
from llmrun.model import Model
from llmrun.model.load_plan import prepare
from llmrun.models.location import find_projector
from llmrun.models.pull import pull
from llmrun.models.registry import load_catalogue, resolve
from llmrun.models.store.in_use import using
from llmrun.planning.choice import chooser
from llmrun.planning.plan import LoadPreferences
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.energy import Energy


class NodeJob(NamedTuple):
    """What every node is to do.

    Attributes:
        name: of the model, as typed.
        wishes: for its plan.
        parallel: rows side by side on each node; None is as many as fit there.
        adapters: that answers are computed with; their paths are the nodes'.
        projector: as locate.find_projector() takes it.
    """

    name: str
    wishes: LoadPreferences
    parallel: int | None
    adapters: tuple[Adapter, ...] = ()
    projector: str | None = None


class NodeReport(NamedTuple):
    """What a node says of itself."""

    version: str
    found: EngineDescription


class ChunkResult(NamedTuple):
    """What became of a piece's rows, and how many engines died since the last piece."""

    rows: tuple[FinishedRow, ...]
    deaths: int


class _Outbox:
    """The sink of a node's engine: what comes goes to the piece that waits for it. Safe from any thread."""

    def __init__(self) -> None:
        self.begun: Future[None] = Future()
        self._lock = threading.Lock()
        self._asked: dict[int, Future[FinishedRow]] = {}
        self._deaths = 0
        self._error: LlmrunError | None = None

    def ask(self, piece: Sequence[PendingRow]) -> tuple[list[Future[FinishedRow]], list[PendingRow]]:
        """What will be each row's result, and the rows nobody has asked yet: Ray may bring a piece twice."""
        with self._lock:
            if self._error is not None:
                raise self._error
            new = [todo for todo in piece if todo.row.number not in self._asked]
            self._asked.update((todo.row.number, Future()) for todo in new)
            return [self._asked[todo.row.number] for todo in piece], new

    def begin(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)

    def meter(self, energy: Energy) -> None:
        """Nobody asks a node for its joules."""

    def put(self, done: FinishedRow) -> None:
        with self._lock:
            waiting = self._asked.pop(done.row)
        waiting.set_result(done)

    def died(self) -> None:
        with self._lock:
            self._deaths += 1

    def note(self, text: str) -> None:
        """Nothing an engine here has to say."""

    def fail(self, error: LlmrunError) -> None:
        """No more will come."""
        with self._lock:
            self._error = error
            left: list[Future[Any]] = [*self._asked.values(), *([] if self.begun.done() else [self.begun])]
        for waiting in left:
            waiting.set_exception(error)

    def take_deaths(self) -> int:
        """How many engines died since it was asked last."""
        with self._lock:
            deaths, self._deaths = self._deaths, 0
            return deaths


class NodeEngine:
    """A node's engine; Ray calls it from several threads.

    Args:
        need: what all rows take.
        n_cpus: cores that Ray gives it.
    """

    def __init__(self, job: NodeJob, need: RowRequirements, n_cpus: int) -> None:
        self._job, self._need, self._n_cpus = job, need, n_cpus
        self._lock = threading.Lock()
        self._used = ExitStack()  # until the process ends
        self._engine: LocalEngine | None = None
        self._runner: BatchRun | None = None
        self._outbox = _Outbox()

    def find(self) -> NodeReport:
        """Find or fetch the model, and plan it.

        Raises:
            LlmrunError: it can't be had, or not be run here.
        """
        job, settings = self._job, load_settings()
        spec = resolve(job.name, load_catalogue())
        path = pull(spec, settings, choose=chooser(settings))
        self._used.enter_context(using(path))

        def prepared(wishes: LoadPreferences) -> Model:
            projector = find_projector(path, job.projector)
            model = prepare(spec, path, wishes, warm_up=True, projector=projector, adapters=job.adapters)
            if wishes.threads is None and model.plan.threads > self._n_cpus:
                return prepared(replace(wishes, threads=self._n_cpus))
            return model

        self._engine = LocalEngine(prepared, job.wishes, job.parallel, job.adapters)
        return NodeReport(llmrun.__version__, self._engine.find(self._need))

    def load(self) -> bool:
        """Start the engine where it does not run yet; true when it runs.

        Raises:
            LlmrunError: the model can't be loaded.
        """
        with self._lock:
            if self._engine is None:
                self.find()
            if self._runner is None:
                assert self._engine is not None
                self._runner = BatchRun(self._engine.model, self._outbox)
                threading.Thread(target=self._run, args=(self._runner,), name="batch", daemon=True).start()
        self._outbox.begun.result()
        return True

    def answer(self, piece: Sequence[PendingRow]) -> ChunkResult:
        """Answer rows, beside those of other pieces.

        Raises:
            LlmrunError: the model can't be loaded (any more).
        """
        self.load()
        assert self._runner is not None
        waiting, new = self._outbox.ask(piece)
        self._runner.add(new)
        return ChunkResult(tuple(each.result() for each in waiting), self._outbox.take_deaths())

    def _run(self, runner: BatchRun) -> None:
        """Own thread: all pieces."""
        try:
            runner.run(stays=True)
        except LlmrunError as error:
            self._outbox.fail(error)

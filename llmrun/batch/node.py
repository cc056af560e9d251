"""One node of a Ray cluster: locates or downloads the model, plans its load, and answers pieces with an engine.

Runs on the node, in Ray's process, without calls of Ray. Ray may restart it at any time, so that all state is with the
driver.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import llmrun
from llmrun.batch.answerers import LocalEngine
from llmrun.batch.plan import EngineDescription, RowRequirements
from llmrun.batch.rows import FinishedRow, PendingRow
from llmrun.batch.run import BatchRun
from llmrun.config import load_settings
from llmrun.errors import LlmrunError
from llmrun.model import Model
from llmrun.model.loading import prepare
from llmrun.models.location import find_projector
from llmrun.models.pull import pull
from llmrun.models.registry import resolve
from llmrun.models.store.use import using
from llmrun.planning.estimate import choose_files
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.adapters import Adapter


class NodeJob(NamedTuple):
    """The work of every node."""

    name: str  # of the model, as typed
    preferences: LoadPreferences
    parallel: int | None  # number of parallel rows per node; None: as many as fit
    adapters: tuple[Adapter, ...] = ()  # with paths on the nodes
    projector: str | None = None  # see find_projector()


class NodeReport(NamedTuple):
    """The version and the model of a node."""

    version: str
    engine: EngineDescription


class ChunkResult(NamedTuple):
    """The results of a piece, and the number of engines that died since the last piece."""

    rows: tuple[FinishedRow, ...]
    deaths: int


class _Outbox:
    """The RowSink of a node: a result goes to the piece that waits for it. Thread-safe."""

    def __init__(self) -> None:
        self.loaded: Future[None] = Future()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[FinishedRow]] = {}
        self._deaths = 0
        self._error: LlmrunError | None = None

    def register(self, piece: Sequence[PendingRow]) -> tuple[list[Future[FinishedRow]], list[PendingRow]]:
        """Return the future result of each row, and the rows that are new: Ray may deliver a piece twice."""
        with self._lock:
            if self._error is not None:
                raise self._error
            new = [todo for todo in piece if todo.row.number not in self._waiting]
            self._waiting.update((todo.row.number, Future()) for todo in new)
            return [self._waiting[todo.row.number] for todo in piece], new

    def begin(self) -> None:
        if not self.loaded.done():
            self.loaded.set_result(None)

    def put(self, done: FinishedRow) -> None:
        with self._lock:
            waiting = self._waiting.pop(done.row)
        waiting.set_result(done)

    def died(self) -> None:
        with self._lock:
            self._deaths += 1

    def note(self, text: str) -> None:
        """Do nothing: engines have no notes."""

    def fail(self, error: LlmrunError) -> None:
        """End all waiting pieces with an error."""
        with self._lock:
            self._error = error
            pending: list[Future[Any]] = [*self._waiting.values(), *([] if self.loaded.done() else [self.loaded])]
        for waiting in pending:
            waiting.set_exception(error)

    def take_deaths(self) -> int:
        """Return the number of engines that died since the last call."""
        with self._lock:
            deaths, self._deaths = self._deaths, 0
            return deaths


class NodeEngine:
    """A node's engine; Ray calls it from several threads.

    Args:
        n_cpus: number of cores that Ray reserved for it.
    """

    def __init__(self, job: NodeJob, need: RowRequirements, n_cpus: int) -> None:
        self._job, self._need, self._n_cpus = job, need, n_cpus
        self._lock = threading.Lock()
        self._used = ExitStack()  # until the process ends
        self._engine: LocalEngine | None = None
        self._runner: BatchRun | None = None
        self._outbox = _Outbox()

    def find(self) -> NodeReport:
        """Locate or download the model, and plan its load.

        Raises:
            LlmrunError: it can't be downloaded, or can't run on this node.
        """
        job, settings = self._job, load_settings()
        spec = resolve(job.name)
        path = pull(spec, settings, choose=choose_files)
        self._used.enter_context(using(path))

        def prepared(preferences: LoadPreferences) -> Model:
            projector = find_projector(path, job.projector, spec.modelfile.projector)
            model = prepare(spec, path, preferences, warm_up=True, projector=projector, adapters=job.adapters)
            if preferences.threads is None and model.load.threads > self._n_cpus:
                return prepared(replace(preferences, threads=self._n_cpus))
            return model

        self._engine = LocalEngine(prepared, job.preferences, job.parallel)
        return NodeReport(llmrun.__version__, self._engine.find(self._need))

    def load(self) -> bool:
        """Start the engine, if it does not run; return true.

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
        self._outbox.loaded.result()
        return True

    def answer(self, piece: Sequence[PendingRow]) -> ChunkResult:
        """Answer rows, in parallel with those of other pieces.

        Raises:
            LlmrunError: the model can't be loaded (any more).
        """
        self.load()
        assert self._runner is not None
        waiting, new = self._outbox.register(piece)
        self._runner.add(new)
        return ChunkResult(tuple(waiting_call.result() for waiting_call in waiting), self._outbox.take_deaths())

    def _run(self, runner: BatchRun) -> None:
        try:
            runner.run(stays=True)
        except LlmrunError as error:
            self._outbox.fail(error)

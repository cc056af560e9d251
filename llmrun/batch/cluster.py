"""The nodes of a Ray cluster, each with an engine that answers pieces of a batch.

Ray places actors, restarts dead ones, and reports lost nodes. A node returns a whole piece or nothing, and a piece
without answers goes to another node: each row is answered once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

# Read when Ray is imported: no usage reports, and no warnings of Ray for our users.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.exceptions import RayError, RayTaskError
from ray.job_config import JobConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import llmrun
from llmrun.batch.node import ChunkResult, NodeEngine, NodeJob, NodeReport
from llmrun.batch.plan import BatchPlan, EngineDescription, RowRequirements
from llmrun.batch.rows import PendingRow
from llmrun.batch.run import AHEAD, RowSink
from llmrun.errors import LlmrunError, ResourceError, UsageError

_PIECES = 8  # per node's parallel rows: few calls, and a lost node loses little work
_CALLS = 32  # maximum number of concurrent calls of a node
_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
_RESTARTS = 3  # of a node's process, at most

Piece = tuple[PendingRow, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """A node, seen by the driver."""

    name: str  # address
    actor: Any  # handle of its NodeEngine
    engine: EngineDescription | None = None  # None until it has the model
    is_loaded: bool = False
    is_out: bool = False  # gets no more rows
    n_rows: int = 0  # given to it and not finished

    def piece_size(self) -> int:
        """Return the number of rows to give to it next; 0 if it has enough."""
        if self.engine is None or not self.is_loaded or self.is_out or self.n_rows >= self.engine.parallel + AHEAD:
            return 0
        return max(1, self.engine.parallel // _PIECES)


class _InstalledPackage(JobConfig):  # type: ignore[misc]  # Ray's types are not read
    """Nodes import llmrun from where it is installed: Ray would look in the current folder first, in a checkout's
    sources without the native module, say. It has no setting for that."""

    def _serialize(self) -> Any:
        self._py_driver_sys_path.clear()
        return super()._serialize()


@contextmanager
def connected(address: str, job: NodeJob) -> Iterator[Cluster]:
    """Connect to a cluster until the block ends.

    Args:
        address: of its head, "auto", or "local" for a new cluster of this machine.

    Raises:
        UsageError: the address is invalid, or the cluster runs another version of Ray or Python.
        ResourceError: the cluster does not answer, or can't be started on this machine.
    """
    _require_listener(address)
    previous_handler = signal.getsignal(signal.SIGTERM)
    # Ray writes events of nodes to stdout, and has no setting for that.
    ray._private.worker._worker_logs_enabled = False
    try:
        ray.init(
            address,
            include_dashboard=False,
            logging_level=logging.CRITICAL,
            log_to_driver=False,
            # A client of ray:// would send our class to a server that may not have it, and its folder is not added.
            job_config=None if address.startswith("ray://") else _InstalledPackage(),
        )
    except (ConnectionError, TimeoutError) as error:
        raise _unreachable(address, error) from None
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"invalid --ray {address}", why=_last(error)) from None
    except Exception as error:  # Ray has no own exception for a local node that can't start
        raise ResourceError("Ray can't start a node here", why=_last(error)) from error
    signal.signal(signal.SIGTERM, previous_handler)  # Ray sets its own
    cluster = Cluster(job)
    try:
        yield cluster
    finally:
        cluster.close()
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raise ResourceError if an address does not accept connections; Ray itself would retry for two minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise _unreachable(address, error) from None


def _unreachable(address: str, error: Exception) -> ResourceError:
    hint = "`ray status` on its head says whether it runs; without a cluster: --ray local"
    return ResourceError(f"no Ray cluster answers at {address!r}", why=_last(error), hint=hint)


class Cluster:
    """A RowAnswerer: all nodes of the connected cluster."""

    def __init__(self, job: NodeJob) -> None:
        self._job = job
        self._nodes: list[_Node] = []  # with the model
        self._notes: list[str] = []  # for the sink
        self._calls: dict[Future[object], tuple[_Node, Piece]] = {}
        self._finished: SimpleQueue[Future[object]] = SimpleQueue()  # ray.wait() turns a Ctrl-C into a SystemError
        self._engine: EngineDescription | None = None  # by the first node; all others must have the same model
        self._error: LlmrunError = ResourceError("the Ray cluster has no node with a processor")

    def find(self, need: RowRequirements) -> EngineDescription:
        """Create an actor on each node; the first one with the model determines the file of the model."""
        for node in ray.nodes():
            n_cpus, n_gpus = (node["Resources"].get(kind, 0) for kind in ("CPU", "GPU"))
            if not node["Alive"] or n_cpus < 1:
                continue
            options = ray.remote(NodeEngine).options(
                num_cpus=n_cpus,
                num_gpus=n_gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                max_restarts=_RESTARTS,
                max_task_retries=_RESTARTS,
                max_concurrency=_CALLS,
            )
            actor = options.remote(self._job, need, int(n_cpus))
            self._call(_Node(node["NodeManagerAddress"], actor), "find")
        while self._engine is None:
            node, _, result = self._next()
            self._add_node(node, result)
        return self._engine._replace(notes=(*self._take_notes(), *self._engine.notes))

    def seconds(self, plan: BatchPlan) -> float | None:
        """Return None: the speed of the nodes is unknown."""
        return None

    def run(self, todo: Iterable[PendingRow], sink: RowSink) -> None:
        waiting = deque(todo)
        n_left = len(waiting)
        for node in self._nodes:
            self._call(node, "load")
        while n_left:
            self._distribute(waiting)
            node, piece, result = self._next()
            node.n_rows -= len(piece)
            for note in self._take_notes():
                sink.note(note)
            if isinstance(result, ChunkResult):
                for _ in range(result.deaths):
                    sink.died()
                for done in result.rows:
                    sink.put(done)
                n_left -= len(piece)
            elif isinstance(result, NodeReport):
                if self._add_node(node, result):
                    self._call(node, "load")
            elif result is not None:
                node.is_loaded = True
                sink.begin()
            else:
                waiting.extendleft(reversed(piece))

    def _distribute(self, waiting: deque[PendingRow]) -> None:
        """Give pieces to the nodes with room, in turns."""
        while waiting and (ready := [node for node in self._nodes if node.piece_size()]):
            node = min(ready, key=lambda candidate: candidate.n_rows)
            piece = tuple(waiting.popleft() for _ in range(min(node.piece_size(), len(waiting))))
            self._call(node, "answer", piece)
            node.n_rows += len(piece)

    def _call(self, node: _Node, method: str, piece: Piece = ()) -> None:
        """Call a method of a node's NodeEngine; _next() returns the result."""
        call: Future[object] = getattr(node.actor, method).remote(*([piece] if piece else [])).future()
        self._calls[call] = node, piece
        call.add_done_callback(self._finished.put)

    def _next(self) -> tuple[_Node, Piece, object]:
        """Wait for a call to finish; return its result, None if its node is lost.

        Raises:
            LlmrunError: no node is left; the error of the last one.
        """
        if not self._calls:
            raise self._error
        call = self._finished.get()
        node, piece = self._calls.pop(call)
        try:
            return node, piece, call.result()
        except RayTaskError as error:
            is_known = isinstance(error.cause, LlmrunError)
            self._leave_out(
                node, error.cause if is_known else ResourceError("a node's engine failed", why=_last(error))
            )
        except RayError:
            why = "its machine, its network or its process ended"
            self._leave_out(node, ResourceError("a Ray node was lost", why=why, hint="run the same command again"))
        return node, piece, None

    def _add_node(self, node: _Node, result: object) -> bool:
        """Add a node that found its model; return whether it has the same version and model as the others."""
        if not isinstance(result, NodeReport):
            return False
        version, engine = result
        if version != llmrun.__version__:
            self._leave_out(node, UsageError(f"a node has llmrun {version}, not {llmrun.__version__}"))
        elif self._engine is not None and engine.model != self._engine.model:
            why = f"{engine.model}, not {self._engine.model}: name one with owner/repo:quant"
            self._leave_out(node, UsageError("a node has another file of the model", why=why))
        else:
            node.engine = engine
            self._engine = self._engine or engine
            self._nodes.append(node)
        return not node.is_out

    def _leave_out(self, node: _Node, error: LlmrunError) -> None:
        if not node.is_out:
            node.is_out, self._error = True, error
            self._notes.append(f"node {node.name} is left out: {error}")

    def close(self) -> None:
        """End all engines. Their calls must end before Ray does, which otherwise warns of every call."""
        for node in {node for node, _ in self._calls.values()}.union(self._nodes):
            ray.kill(node.actor)
        with suppress(Empty):
            while self._calls:
                del self._calls[self._finished.get(timeout=_CLOSE_SECONDS)]

    def _take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes


def _last(error: BaseException) -> str:
    """Return the last line of an error's text, which may be a traceback."""
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)

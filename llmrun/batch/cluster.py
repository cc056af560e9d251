"""The nodes of a Ray cluster, for the rows of a batch: an engine on each, and rows in pieces to whoever has room.

Owns all calls of Ray; must not know models or where answers go. Ray places actors, starts those anew that died, and
says which node is gone; a piece that came back without answers goes to another node. Only whole pieces come back, so
that each row's answer comes once.
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

# Read when Ray is imported: a cluster of ours reports to nobody, and Ray's own warnings are not for our users.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import llmrun
from llmrun.batch.ledger import RowSink
from llmrun.batch.node import ChunkResult, NodeEngine, NodeJob, NodeReport
from llmrun.batch.plan import BatchPlan, EngineDescription, RowRequirements
from llmrun.batch.rows import PendingRow
from llmrun.batch.run import AHEAD
from llmrun.errors import LlmrunError, ResourceError, UsageError

_PIECES = 8  # that a node's rows side by side are cut into: few calls, and little that one dead node takes along
_CALLS = 32  # that a node takes at the same time; there are never more
_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
_RESTARTS = 3  # of a node's process

Piece = tuple[PendingRow, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """A node, as the driver knows it.

    Attributes:
        name: its address.
        actor: handle of its NodeEngine.
        found: what it said of itself, once it has the model.
        is_loaded: its engine can get rows.
        is_out: it gets no more.
        inside: rows that it has.
    """

    name: str
    actor: Any
    found: EngineDescription | None = None
    is_loaded: bool = False
    is_out: bool = False
    inside: int = 0

    def piece(self) -> int:
        """Rows to give to it next; 0 where it has enough."""
        if self.found is None or not self.is_loaded or self.is_out or self.inside >= self.found.parallel + AHEAD:
            return 0
        return max(1, self.found.parallel // _PIECES)


@contextmanager
def connected(address: str, job: NodeJob) -> Iterator[Cluster]:
    """A cluster, until the block ends.

    Args:
        address: of its head, "auto", or "local" for one of this machine that ends with the block.

    Raises:
        UsageError: the address is invalid, or the cluster runs another version of Ray or Python.
        ResourceError: nobody answers there, or a cluster of this machine can't start.
    """
    _require_listener(address)
    ending = signal.getsignal(signal.SIGTERM)
    # It writes what happens to nodes to stdout, and has no setting for that.
    ray._private.worker._worker_logs_enabled = False
    try:
        ray.init(address, include_dashboard=False, logging_level=logging.CRITICAL, log_to_driver=False)
    except (ConnectionError, TimeoutError) as error:
        raise _nobody_at(address, error) from None
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"invalid --ray {address}", why=_last(error)) from None
    except Exception as error:  # Ray raises nothing more exact where a node of its own can't start
        raise ResourceError("Ray can't start a node here", why=_last(error)) from error
    signal.signal(signal.SIGTERM, ending)  # Ray sets its own
    cluster = Cluster(job)
    try:
        yield cluster
    finally:
        cluster.close()
        ray.shutdown()


def _require_listener(address: str) -> None:
    """See that somebody listens at an address; Ray itself would try for two minutes.

    Raises:
        ResourceError: nobody does.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _nobody_at(address, error) from None


def _nobody_at(address: str, error: Exception) -> ResourceError:
    hint = "`ray status` on its head says whether it runs; without a cluster: --ray local"
    return ResourceError(f"no Ray cluster answers at {address!r}", why=_last(error), hint=hint)


class Cluster:
    """An Answering: all nodes of the cluster that Ray is connected to."""

    def __init__(self, job: NodeJob) -> None:
        self._job = job
        self._nodes: list[_Node] = []  # that have the model
        self._notes: list[str] = []  # that nobody has taken yet
        self._calls: dict[Future[object], tuple[_Node, Piece]] = {}
        self._ended: SimpleQueue[Future[object]] = SimpleQueue()  # ray.wait() turns a Ctrl-C into a SystemError
        self._found: EngineDescription | None = None  # by the first node: all others have to have the same model
        self._error: LlmrunError = ResourceError("the Ray cluster has no node with a processor")

    def find(self, need: RowRequirements) -> EngineDescription:
        """See Answering: an actor on each node; the first that has the model says which one it is."""
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
        while self._found is None:
            node, _, result = self._next()
            self._take_in(node, result)
        return self._found._replace(notes=(*self._take_notes(), *self._found.notes))

    def seconds(self, plan: BatchPlan) -> float | None:
        """See Answering: what the nodes' kernels do was not measured."""
        return None

    def run(self, todo: Iterable[PendingRow], sink: RowSink) -> None:
        """See Answering."""
        waiting = deque(todo)
        n_left = len(waiting)
        for node in self._nodes:
            self._call(node, "load")
        while n_left:
            self._share_out(waiting)
            node, piece, result = self._next()
            node.inside -= len(piece)
            for note in self._take_notes():
                sink.note(note)
            if isinstance(result, ChunkResult):
                for _ in range(result.deaths):
                    sink.died()
                for done in result.rows:
                    sink.put(done)
                n_left -= len(piece)
            elif isinstance(result, NodeReport):
                if self._take_in(node, result):
                    self._call(node, "load")
            elif result is not None:
                node.is_loaded = True
                sink.begin()
            else:
                waiting.extendleft(reversed(piece))

    def _share_out(self, waiting: deque[PendingRow]) -> None:
        """Give pieces to all that have room, in turns."""
        while waiting and (ready := [node for node in self._nodes if node.piece()]):
            node = min(ready, key=lambda each: each.inside)
            piece = tuple(waiting.popleft() for _ in range(min(node.piece(), len(waiting))))
            self._call(node, "answer", piece)
            node.inside += len(piece)

    def _call(self, node: _Node, method: str, piece: Piece = ()) -> None:
        """Call a method of a node's NodeEngine; _next() has what comes of it."""
        call: Future[object] = getattr(node.actor, method).remote(*([piece] if piece else [])).future()
        self._calls[call] = node, piece
        call.add_done_callback(self._ended.put)

    def _next(self) -> tuple[_Node, Piece, object]:
        """What the call that ends next came to: None where its node is lost.

        Raises:
            LlmrunError: there are no more, because no node is left: what was wrong with the last one.
        """
        if not self._calls:
            raise self._error
        ended = self._ended.get()
        node, piece = self._calls.pop(ended)
        try:
            return node, piece, ended.result()
        except RayTaskError as error:
            known = isinstance(error.cause, LlmrunError)
            self._leave_out(node, error.cause if known else ResourceError("a node's engine failed", why=_last(error)))
        except RayError as error:
            self._leave_out(node, ResourceError("a node's engine was lost", why=_last(error)))
        return node, piece, None

    def _take_in(self, node: _Node, result: object) -> bool:
        """Take note of what a node found; whether it can answer like the others."""
        if not isinstance(result, NodeReport):
            return False
        version, found = result
        if version != llmrun.__version__:
            self._leave_out(node, UsageError(f"a node has llmrun {version}, not {llmrun.__version__}"))
        elif self._found is not None and found.model != self._found.model:
            why = f"{found.model}, not {self._found.model}: name one with owner/repo:quant"
            self._leave_out(node, UsageError("a node has another file of the model", why=why))
        else:
            node.found = found
            self._found = self._found or found
            self._nodes.append(node)
        return not node.is_out

    def _leave_out(self, node: _Node, error: LlmrunError) -> None:
        if not node.is_out:
            node.is_out, self._error = True, error
            self._notes.append(f"node {node.name} is left out: {error}")

    def close(self) -> None:
        """End all engines. What they still had ends before Ray does, which would complain of every call."""
        for node in {node for node, _ in self._calls.values()}.union(self._nodes):
            ray.kill(node.actor)
        with suppress(Empty):
            while self._calls:
                del self._calls[self._ended.get(timeout=_CLOSE_SECONDS)]

    def _take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes


def _last(error: BaseException) -> str:
    """The last line of what an error says: of a traceback what it is about."""
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)

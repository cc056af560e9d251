"""A Ray cluster whose nodes answer each row with its text, die, and fail as they are told. Calls end in turns."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError, RayTaskError

import llmrun
from llmrun.batch.node import ChunkResult, NodeReport
from llmrun.batch.plan import EngineDescription
from llmrun.batch.rows import FinishedRow
from llmrun.errors import LlmrunError


@dataclass
class FakeNode:
    """A node.

    Attributes:
        dies_after: pieces that it answers before it is lost.
        finds, loads: what its calls of find() and load() fail with.
        pieces: that it was given.
        most_inside: rows that it had at the same time.
    """

    name: str
    parallel: int = 8
    model: str = "tiny.gguf 1 []"
    version: str = llmrun.__version__
    cpus: float = 2.0
    alive: bool = True
    dies_after: int | None = None
    finds: LlmrunError | None = None
    loads: LlmrunError | None = None
    pieces: list[tuple[int, ...]] = field(default_factory=list)
    most_inside: int = 0
    inside: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def result(self, method: str, piece: Sequence[Any]) -> Any:
        if method == "answer":
            self.inside -= len(piece)
        if self.dies_after is not None and len(self.pieces) > self.dies_after:
            raise ActorDiedError
        if error := {"find": self.finds, "load": self.loads}.get(method):
            raise RayTaskError(method, "traceback", error)
        if method == "find":
            return NodeReport(self.version, EngineDescription("tiny", self.model, True, self.parallel))
        if method == "load":
            return True
        lines = (FinishedRow(each.row.number, each.key, {"answer": self.name, "error": None}) for each in piece)
        return ChunkResult(tuple(lines), deaths=0)


class FakeRay:
    """What llmrun.batch.cluster calls of the module `ray`."""

    def __init__(self, *nodes: FakeNode) -> None:
        self._nodes = {node.name: node for node in nodes}

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": "1" * 56, "Alive": node.alive, "NodeManagerAddress": name, "Resources": {"CPU": node.cpus}}
            for name, node in self._nodes.items()
        ]

    def remote(self, kind: type) -> FakeRay:
        return self

    def options(self, **options: Any) -> SimpleNamespace:
        node = next(each for each in self._nodes.values() if each.alive and each.cpus >= 1 and not each.options)
        node.options = options
        return SimpleNamespace(remote=lambda *arguments: self._actor(node))

    def _actor(self, node: FakeNode) -> SimpleNamespace:
        methods = ("find", "load", "answer")
        return SimpleNamespace(**{name: SimpleNamespace(remote=partial(self.call, node, name)) for name in methods})

    def call(self, node: FakeNode, method: str, piece: Sequence[Any] = ()) -> SimpleNamespace:
        if method == "answer":
            node.pieces.append(tuple(each.row.number for each in piece))
            node.inside += len(piece)
            node.most_inside = max(node.most_inside, node.inside)
        return SimpleNamespace(future=lambda: _Call(node, method, piece))


class _Call(Future[Any]):
    """Ended as soon as it is made; what comes of it is decided when it is asked for."""

    def __init__(self, node: FakeNode, method: str, piece: Sequence[Any]) -> None:
        super().__init__()
        self._node, self._method, self._piece = node, method, piece
        self.set_result(None)

    def result(self, timeout: float | None = None) -> Any:
        return self._node.result(self._method, self._piece)

"""A node's engine: pieces go in from several threads, and each gets its own rows back."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from support import gguf_writer

import llmrun
from llmrun.batch import node
from llmrun.batch.node import NodeEngine, NodeJob
from llmrun.batch.plan import RowRequirements
from llmrun.batch.rows import FinishedRow, PendingRow, Row, RowTemplate
from llmrun.errors import OutOfMemoryError
from llmrun.model import Model
from llmrun.planning.preferences import LoadPreferences


class FakeRun:
    """Answers rows two at a time, the second one first.

    Attributes:
        fails: the model can't be loaded.
    """

    fails = False

    def __init__(self, model: Model, sink: Any) -> None:
        self._sink, self._rows = sink, SimpleQueue[PendingRow]()

    def add(self, todo: Iterable[PendingRow]) -> None:
        for each in todo:
            self._rows.put(each)

    def run(self, *, stays: bool) -> None:
        assert stays
        if FakeRun.fails:
            raise OutOfMemoryError("no room")
        self._sink.begin()
        while True:
            pair = [self._rows.get(), self._rows.get()]
            self._sink.died()
            for each in reversed(pair):
                self._sink.put(FinishedRow(each.row.number, each.key, {"error": None}))


@pytest.fixture
def engine(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeEngine:
    monkeypatch.setattr(node, "BatchRun", FakeRun)
    monkeypatch.setattr(FakeRun, "fails", False)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_writer.tiny_model({"llama.context_length": 4096}))
    return NodeEngine(NodeJob(str(path), LoadPreferences(), None), RowRequirements(500, 100), n_cpus=1)


def piece(*numbers: int) -> list[PendingRow]:
    rows = [Row(number, {"prompt": str(number)}) for number in numbers]
    return [PendingRow(row, RowTemplate().request(row), str(row.number)) for row in rows]


def test_a_node_says_what_it_has(engine: NodeEngine) -> None:
    version, found = engine.find()
    assert version == llmrun.__version__
    assert found.model.startswith("tiny.gguf ")
    assert not found.has_template
    assert found.parallel > 1
    assert engine._engine is not None
    assert engine._engine.model.plan.load.threads == 1


def test_pieces_get_their_own_rows(engine: NodeEngine) -> None:
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(engine.answer, (piece(1, 2, 3), piece(4, 5, 6)))
    assert [done.row for done in first.rows] == [1, 2, 3]
    assert [done.row for done in second.rows] == [4, 5, 6]
    assert first.deaths + second.deaths == 3


def test_a_piece_that_comes_twice_is_asked_once(engine: NodeEngine) -> None:
    engine.load()
    outbox = engine._outbox
    waiting, new = outbox.register(piece(1, 2))
    assert [todo.row.number for todo in new] == [1, 2]
    again, none = outbox.register(piece(1, 2))
    assert (again, none) == (waiting, [])


def test_a_model_that_cant_be_loaded_is_told_to_all(engine: NodeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRun, "fails", True)
    for _ in range(2):
        with pytest.raises(OutOfMemoryError):
            engine.answer(piece(1))

"""Rows over the nodes of a cluster: each is answered once, whoever is lost on the way."""

from __future__ import annotations

import socket
from collections import Counter

import pytest

pytest.importorskip("ray")
from support.fake_ray import FakeNode, FakeRay

from llmrun.batch import cluster
from llmrun.batch.cluster import Cluster
from llmrun.batch.node import NodeJob
from llmrun.batch.plan import EngineDescription, RowRequirements
from llmrun.batch.rows import FinishedRow, PendingRow, Row, RowTemplate
from llmrun.batch.run import AHEAD
from llmrun.errors import LlmrunError, OutOfMemoryError, ResourceError, UsageError
from llmrun.planning.preferences import LoadPreferences


class Collected:
    """A sink that keeps what comes."""

    def __init__(self) -> None:
        self.done: list[FinishedRow] = []
        self.notes: list[str] = []
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1

    def put(self, done: FinishedRow) -> None:
        self.done.append(done)

    def died(self) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def rows(self) -> Counter[int]:
        return Counter(done.row for done in self.done)


def todo(count: int) -> list[PendingRow]:
    rows = [Row(number, {"prompt": str(number)}) for number in range(1, count + 1)]
    return [PendingRow(row, RowTemplate().request(row), str(row.number)) for row in rows]


def answered(monkeypatch: pytest.MonkeyPatch, *nodes: FakeNode, rows: int = 100) -> tuple[EngineDescription, Collected]:
    monkeypatch.setattr(cluster, "ray", FakeRay(*nodes))
    whole, sink = Cluster(NodeJob("tiny", LoadPreferences(), None)), Collected()
    found = whole.find(RowRequirements(rows, 100))
    whole.run(todo(rows), sink)
    return found, sink


EVERY_ROW = Counter(range(1, 101))


def test_all_nodes_answer_and_none_has_more_rows_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = FakeNode("small", parallel=4), FakeNode("large", parallel=32, cpus=16)
    found, sink = answered(monkeypatch, small, large, FakeNode("gone", alive=False), FakeNode("head", cpus=0))
    assert sink.rows == EVERY_ROW
    assert found.model == small.model
    for node, piece in ((small, 1), (large, 4)):
        assert max(map(len, node.pieces)) == piece
        assert node.parallel <= node.most_inside < node.parallel + AHEAD + piece
    assert large.options["num_cpus"] == 16
    assert {done.result["answer"] for done in sink.done} == {"small", "large"}


def test_the_rows_of_a_node_that_is_lost_go_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    _, sink = answered(monkeypatch, FakeNode("a", dies_after=5), FakeNode("b"))
    assert sink.rows == EVERY_ROW
    assert sink.notes == ["node a is left out: a Ray node was lost: its machine, its network or its process ended"]


def test_a_node_that_cant_hold_the_model_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    full = OutOfMemoryError("tiny does not fit")
    for poor in (FakeNode("poor", finds=full), FakeNode("poor", loads=full)):
        found, sink = answered(monkeypatch, poor, FakeNode("b"))
        assert sink.rows == EVERY_ROW
        assert [*found.notes, *sink.notes] == ["node poor is left out: tiny does not fit"]
        assert not poor.pieces


def test_a_node_with_another_model_or_version_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for odd, why in ((FakeNode("b", model="other.gguf 2 []"), "other.gguf"), (FakeNode("b", version="0.0.1"), "0.0.1")):
        _, sink = answered(monkeypatch, FakeNode("a"), odd)
        assert sink.rows == EVERY_ROW
        assert why in sink.notes[0]
        assert sink.notes[0].startswith("node b is left out: a node has")
        assert not odd.pieces


def test_without_any_node_left_the_last_ones_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes, kind in (
        ((FakeNode("a", finds=OutOfMemoryError("it does not fit")),), OutOfMemoryError),
        ((FakeNode("a", dies_after=3),), ResourceError),
        ((), ResourceError),
    ):
        with pytest.raises(LlmrunError) as raised:
            answered(monkeypatch, *nodes)
        assert type(raised.value) is kind


def test_where_nobody_listens_there_is_no_cluster() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with (
        pytest.raises(ResourceError, match="no Ray cluster answers"),
        cluster.connected(f"127.0.0.1:{port}", NodeJob("tiny", LoadPreferences(), None)),
    ):
        pass
    with (
        pytest.raises(ResourceError, match="no Ray cluster answers"),
        cluster.connected("a..b:6379", NodeJob("tiny", LoadPreferences(), None)),
    ):
        pass
    with (
        pytest.raises(UsageError, match="--ray bogus"),
        cluster.connected("bogus", NodeJob("tiny", LoadPreferences(), None)),
    ):
        pass


def test_a_node_that_cannot_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*args: object, **options: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(ResourceError) as raised, cluster.connected("local", NodeJob("tiny", LoadPreferences(), None)):
        pass
    assert raised.value.why == "The current node timed out during startup."

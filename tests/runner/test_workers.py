"""Workers are asked before anything is loaded: what can be wrong with them is said in one line."""

from __future__ import annotations

import socket

import pytest
from support.stand_in_worker import DEVICES, Serve, closing, garbage, good, silent, too_many_devices, worker

from llmrun.errors import NetworkError, UsageError
from llmrun.runner import workers
from llmrun.runner.workers import (
    MOST_WORKERS,
    VERSION,
    ask,
    ask_all,
    engine_environment,
    missing,
    read_endpoints,
)


def test_endpoints() -> None:
    assert read_endpoints("a.example:1, 10.0.0.2") == ("a.example:1", "10.0.0.2:50052")


@pytest.mark.parametrize("text", ["", "a:0", "a:65536", "a:b", ":1", "[::1]:50052", "a:1,,b:2", "http://a:1", "a b:1"])
def test_other_texts_are_no_endpoints(text: str) -> None:
    with pytest.raises(UsageError, match="invalid --rpc"):
        read_endpoints(text)


def test_a_worker_twice() -> None:
    with pytest.raises(UsageError, match="a:50052 twice"):
        read_endpoints("a,b,a:50052")


def test_more_workers_than_ggml_can_use() -> None:
    assert len(read_endpoints(",".join(f"w{number}" for number in range(MOST_WORKERS)))) == MOST_WORKERS
    with pytest.raises(UsageError, match="17 workers"):
        read_endpoints(",".join(f"w{number}" for number in range(MOST_WORKERS + 1)))


def test_a_worker_says_what_it_has() -> None:
    with worker(good()) as endpoint:
        found = ask(endpoint)
    assert found.memory_free == tuple(free for free, _ in DEVICES)
    assert found.memory_total == sum(total for _, total in DEVICES)


def test_two_names_of_one_worker() -> None:
    with worker(good()) as endpoint, pytest.raises(UsageError, match="the same worker"):
        ask_all([endpoint, endpoint.replace("127.0.0.1", "localhost")])


@pytest.mark.parametrize("version", [(6, 0, 0), (7, 1, 0), (7, 0, 1), (8, 0, 0)])
def test_another_version(version: tuple[int, int, int]) -> None:
    assert version != VERSION
    with worker(good(version)) as endpoint, pytest.raises(NetworkError, match=r"speaks version \d\.\d\.\d"):
        ask(endpoint)


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (closing, "it closed the connection"),
        (garbage, "it answers with something else"),
        (too_many_devices, "5,000 devices"),
        (silent, "serves one program at a time"),
    ],
)
def test_what_is_not_a_worker(serve: Serve, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SECONDS", 0.2 if serve is silent else 30.0)
    with worker(serve) as endpoint, pytest.raises(NetworkError, match=why) as caught:
        ask(endpoint)
    assert endpoint in caught.value.what
    assert caught.value.hint


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NetworkError, match="nothing listens there") as caught:
        ask(f"127.0.0.1:{port}")
    assert caught.value.hint == f"on that machine: llmrun worker --port {port}"


def test_an_unknown_name() -> None:
    for name in ("nowhere.invalid", "a..b", "x" * 64):
        with pytest.raises(NetworkError, match=f"no machine is known as {name}"):
            ask(f"{name}:50052")


def test_threads_stay_on_their_cores_unless_somebody_placed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    assert engine_environment() == {"OMP_PLACES": "cores", "OMP_PROC_BIND": "spread"}
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0-1")
    assert engine_environment() == {}


def test_who_is_missing() -> None:
    with worker(good()) as first, worker(closing) as second:
        assert missing([first]) is None
        found = missing([first, second])
    assert found is not None
    assert found[0] == second

"""Real workers on this machine compute what this machine computes alone, and their deaths are told.

Needs LLAMA_CPP, the folder of llama.cpp in llama-cpp-python's source archive: ggml's RPC backend is compiled from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.gguf_writer import runnable_model
from support.rpc_module import build
from support.rpc_workers import RealWorker, real_workers

from llmrun.errors import EngineCrashedError, NetworkError
from llmrun.model import Model
from llmrun.model.loading import prepare
from llmrun.models.registry import ModelSpec
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.messages import TextDelta
from llmrun.protocol.params import Limits
from llmrun.runner.client import EngineClient

LLAMA_CPP = os.environ.get("LLAMA_CPP", "")

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.slow,
    pytest.mark.skipif(not LLAMA_CPP, reason="LLAMA_CPP is not set"),
]


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(Path(LLAMA_CPP), tmp_path_factory.mktemp("rpc") / "libggml-rpc.so")


@pytest.fixture
def workers(module: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RealWorker]]:
    monkeypatch.setenv("GGML_BACKEND_PATH", str(module))
    with real_workers(2) as found:
        yield found


def model(folder: Path, *workers: RealWorker) -> Model:
    """A tiny one over these workers, not loaded."""
    path = folder / "tiny.gguf"
    path.write_bytes(runnable_model())
    wishes = LoadPreferences(n_ctx=512, workers=tuple(worker.endpoint for worker in workers), flash_attention="on")
    found = prepare(ModelSpec("tiny", path=path), path, wishes)
    found.plan = replace(found.plan, load=replace(found.load, repack=False))
    return found


def answered(found: Model) -> str:
    with found:
        found.start(EngineClient())
        return answer(found)


def answer(found: Model) -> str:
    return found.generate("abc", temperature=0, max_tokens=24).text


def kill_while_answering(found: Model, worker: RealWorker) -> None:
    for event in found.generate("abc", temperature=0, limits=Limits(400, ignores_end=True)):
        if isinstance(event, TextDelta):
            worker.kill()


def test_the_same_text(workers: list[RealWorker], tmp_path: Path) -> None:
    spread = model(tmp_path, *workers)
    assert sum(spread.load.layer_counts) > 0
    assert answered(spread) == answered(model(tmp_path))


def test_a_worker_that_dies_is_named_and_the_model_answers_again(workers: list[RealWorker], tmp_path: Path) -> None:
    second = workers[1]
    with model(tmp_path, *workers) as found:
        found.start(EngineClient())
        before = answer(found)
        with pytest.raises(EngineCrashedError, match=f"the worker {second.endpoint} was lost in") as caught:
            kill_while_answering(found, second)
        assert "llmrun worker" in caught.value.hint
        with pytest.raises(NetworkError, match="nothing listens there"):
            found.generate("abc", temperature=0)
        workers[1] = RealWorker(int(second.endpoint.rpartition(":")[2]))
        assert answer(found) == before

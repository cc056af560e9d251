"""Which engine is asked for GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmrun.planning import machine
from llmrun.planning.machine import this_machine
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.build import Build
from llmrun.runner import client, launch

CARD = Gpu("CUDA0", "a card", 24 << 30, 20 << 30, shared=False)


class FakeEngine:
    """Sees one GPU."""

    def __init__(self, *, alive: bool = True) -> None:
        self.alive, self.asked, self.closed = alive, 0, False

    def do(self, *command: Any, seconds: float | None) -> Build:
        self.asked += 1
        return Build({}, (CARD,), offload=True)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def with_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """llama.cpp was built for it."""
    (tmp_path / "libggml-cuda.so").touch()
    monkeypatch.setattr(machine, "backend_folders", lambda: [tmp_path])


@pytest.mark.parametrize("alive", [True, False])
def test_the_commands_own_engine_is_asked_and_kept(monkeypatch: pytest.MonkeyPatch, alive: bool) -> None:
    """It knows what was free before it began to load weights ahead; another one would find them in the memory."""
    prestarted, another = FakeEngine(alive=alive), FakeEngine()
    monkeypatch.setattr(launch, "has_prestarted", True)
    monkeypatch.setattr(client, "prestarted", lambda: prestarted)
    monkeypatch.setattr(client, "EngineClient", lambda: another)
    assert this_machine().gpus == (CARD,)
    assert (prestarted.asked, another.asked) == ((1, 0) if alive else (0, 1))
    assert not prestarted.closed


def test_an_engine_that_was_started_to_ask_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(launch, "has_prestarted", False)
    monkeypatch.setattr(client, "EngineClient", lambda: engine)
    assert this_machine().gpus == (CARD,)
    assert engine.closed


def test_a_llama_cpp_for_processors_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libggml-cuda.so").unlink()
    engine = FakeEngine()
    monkeypatch.setattr(client, "EngineClient", lambda: engine)
    assert this_machine().gpus == ()
    assert not engine.asked

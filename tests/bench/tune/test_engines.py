"""The engines of a search: separate where loading differs, shared where it does not, closed for room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from llmrun.bench.tune.run import EngineBackend
from llmrun.errors import EngineCrashedError
from llmrun.planning.tuned import TunableSettings
from llmrun.protocol.jobs.bench import Bench, BenchModel, BenchResult, BenchTest, Repetition
from llmrun.protocol.loading import Load

MODEL = BenchModel("tiny", 1, 1, 1, 1, "", "", "CPU", "", "")
DEFAULT = TunableSettings(threads=2, threads_batch=2)
DECODE = BenchTest(n_gen=8)


class FakeRunner:
    """A runner that takes two seconds for everything, and records its commands."""

    started: list[FakeRunner]

    def __init__(self, environment: Mapping[str, str] | None) -> None:
        self.environment = environment
        self.commands: list[Bench] = []
        self.closed = False
        FakeRunner.started.append(self)

    def do(self, kind: Any, command: Bench) -> BenchResult:
        if command.load.n_ubatch == 13:
            raise EngineCrashedError("the engine died")
        self.commands.append(command)
        return BenchResult(MODEL, (Repetition(2_000_000_000),) * command.repetitions, 500_000_000, None)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> EngineBackend:
    FakeRunner.started = []
    monkeypatch.setattr("llmrun.bench.tune.run.launch", lambda environment: environment)
    monkeypatch.setattr("llmrun.bench.tune.run.EngineClient", FakeRunner)
    return EngineBackend(Load("/model.gguf", n_ctx=512, n_ctx_start=512, threads=2), n_engines=2)


def test_rates(machine: EngineBackend) -> None:
    assert machine.rates(DEFAULT, DECODE, 3) == (4.0, 4.0, 4.0)
    assert machine.load_seconds(DEFAULT) == 0.5
    warming, measuring = FakeRunner.started[0].commands
    assert (warming.test.n_gen, warming.repetitions) == (1, 1)  # touches all weights
    assert measuring.warm_up
    machine.rates(DEFAULT, BenchTest(n_prompt=64), 1)
    assert not FakeRunner.started[0].commands[-1].warm_up  # a second prompt would cost as much as the first


def test_one_engine_does_for_what_needs_no_loading(machine: EngineBackend) -> None:
    for settings in (DEFAULT, replace(DEFAULT, threads=1), replace(DEFAULT, threads_batch=1, n_ubatch=128)):
        machine.rates(settings, DECODE, 1)
    (engine,) = FakeRunner.started
    assert [command.load.threads for command in engine.commands] == [2, 2, 1, 2]
    assert engine.commands[-1].load.n_ubatch == 128


def test_engines_are_kept_apart_and_closed_when_there_is_no_room(machine: EngineBackend) -> None:
    others = [replace(DEFAULT, repack=False), replace(DEFAULT, huge_pages=True, spins=0)]
    for settings in (DEFAULT, others[0], DEFAULT, others[1]):
        machine.rates(settings, DECODE, 1)
    assert [engine.closed for engine in FakeRunner.started] == [False, True, False]
    assert FakeRunner.started[2].environment == others[1].environment
    assert [machine.pending(each, 0)[0] for each in (DEFAULT, *others)] == [False, True, False]
    machine.close()
    assert all(engine.closed for engine in FakeRunner.started)


def test_a_depth_is_prefilled_once(machine: EngineBackend) -> None:
    assert machine.pending(DEFAULT, 256) == (True, True)
    machine.rates(DEFAULT, replace(DECODE, n_depth=256), 1)
    assert machine.pending(replace(DEFAULT, threads=1), 256) == (False, False)
    assert machine.pending(DEFAULT, 512) == (False, True)
    assert machine.pending(DEFAULT, 0) == (False, False)


def test_an_engine_that_died_is_replaced(machine: EngineBackend) -> None:
    with pytest.raises(EngineCrashedError):
        machine.rates(replace(DEFAULT, n_ubatch=13), DECODE, 1)
    assert FakeRunner.started[0].closed
    assert machine.rates(DEFAULT, DECODE, 1)
    assert len(FakeRunner.started) == 2

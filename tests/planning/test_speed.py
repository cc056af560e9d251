"""Measured speed: remembered for this machine and not for another, asked again when it is old, never in the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.busy import busy_processes

from llmrun.config import MEASURED_FILE
from llmrun.errors import EngineCrashedError, LlmrunError
from llmrun.planning import speed
from llmrun.planning.hardware import Details, Hardware
from llmrun.planning.measurements import keep_measured, machine_key
from llmrun.planning.speed import gpu_speeds, measure, remembered, speed_of
from llmrun.protocol.codec import as_dict
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.machine import KERNELS, MachineSpeed, MeasureKernels, Rates
from llmrun.runner.client import EngineClient

GIB = 1 << 30
MACHINE = Hardware("CPU", ("avx2",), 4, 8, None, 16 * GIB, 8 * GIB)
RATES = Rates(((100.0, 1e9), (400.0, 5e8)), 1e11)
ANSWER = MachineSpeed(3e10, 1e-6, {"F16": {64: 1e-8}}, {"F16": {64: 1e-9}}, {})


class Engine:
    """Stands in for the process that measures."""

    def __init__(self) -> None:
        self.asked: list[MeasureKernels] = []
        self.others = 0.0
        self.can = {"Q4_K", "Q6_K", "Q8_0"}

    def do(
        self,
        kind: object,
        command: MeasureKernels,
        on_update: Callable[[float], None] = lambda share: None,
        *,
        seconds: float | None = None,
    ) -> MachineSpeed:
        assert kind is KERNELS
        self.asked.append(command)
        on_update(0.5)
        slow = 1.1 if command.is_shared else 1 + self.others
        rates = replace(
            RATES, decode=tuple((size, rate / slow) for size, rate in RATES.decode), prefill=RATES.prefill / slow
        )
        return replace(ANSWER, read=3e10 / slow, types={kind: rates for kind in command.types if kind in self.can})

    def close(self) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    fake = Engine()
    monkeypatch.setattr(speed, "EngineClient", lambda: fake)
    monkeypatch.setattr(speed, "probe_details", lambda: Details(last_cache=123))
    monkeypatch.setattr(speed.Clock, "others", lambda self: fake.others)
    return fake


def test_measured_once(engine: Engine, tmp_path: Path) -> None:
    first = speed_of(MACHINE, {"Q6_K"}, tmp_path / "new")
    assert engine.asked == [MeasureKernels(4, ("Q4_K", "Q6_K"), 123)]
    assert first.types["Q6_K"] == RATES
    again = speed_of(MACHINE, {"Q6_K"}, tmp_path / "new")
    assert len(engine.asked) == 1
    assert again == first


def test_a_measurement_tells_its_progress(engine: Engine, tmp_path: Path) -> None:
    told: list[float] = []
    speed_of(MACHINE, {"Q6_K"}, tmp_path, on_progress=told.append)
    assert told == [0.0, 0.5]
    speed_of(MACHINE, {"Q6_K"}, tmp_path, on_progress=told.append)
    assert len(told) == 2


def test_another_build_of_llama_cpp_is_measured_for_itself(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed_of(MACHINE, {"Q6_K"}, tmp_path)
    (tmp_path / "libllama.so").write_bytes(b"another build")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    assert remembered(MACHINE, tmp_path) is None
    speed_of(MACHINE, {"Q6_K"}, tmp_path)
    assert len(engine.asked) == 2


def test_another_type_is_measured_and_joins(engine: Engine, tmp_path: Path) -> None:
    speed_of(MACHINE, {"Q6_K"}, tmp_path)
    found = speed_of(MACHINE, {"Q6_K", "Q8_0"}, tmp_path)
    assert engine.asked[1] == MeasureKernels(4, ("Q4_K", "Q8_0"), 123)
    assert set(found.types) == {"Q4_K", "Q6_K", "Q8_0"}


def test_a_gpu_is_measured_once(engine: Engine, tmp_path: Path) -> None:
    gpu = Gpu("CUDA0", "Card", GIB, GIB)
    first = gpu_speeds((gpu,), {"Q6_K"}, MACHINE, tmp_path)
    assert gpu_speeds((gpu,), {"Q6_K"}, MACHINE, tmp_path) == first
    assert engine.asked == [MeasureKernels(4, ("Q4_K", "Q6_K"), gpu="CUDA0")]
    gpu_speeds((replace(gpu, description="Another"),), {"Q6_K"}, MACHINE, tmp_path)
    assert len(engine.asked) == 2


def test_a_gpu_that_can_not_be_measured_is_not_asked_for_again(engine: Engine, tmp_path: Path) -> None:
    def hang(*_: object, seconds: float) -> None:
        engine.asked.append(MeasureKernels(1, ()))
        raise EngineCrashedError("the engine died in its job, kernels")

    engine.do = hang  # type: ignore[method-assign, assignment]
    for words in ("kernels", "failed before"):
        with pytest.raises(LlmrunError, match=words):
            gpu_speeds((Gpu("CUDA0", "Card", GIB, GIB),), {"Q6_K"}, MACHINE, tmp_path)
    assert len(engine.asked) == 1


def test_a_type_that_can_not_be_measured_is_not_asked_for_again(engine: Engine, tmp_path: Path) -> None:
    for _ in range(2):
        assert speed_of(MACHINE, {"NVFP4"}, tmp_path).types["NVFP4"] == Rates()
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(MACHINE, cpu_name="another"),
        replace(MACHINE, cpu_quota=2.0),
        replace(MACHINE, cpu_flags=()),
        replace(MACHINE, memory_total=8 * GIB),
    ],
)
def test_another_machine_is_measured_again(engine: Engine, tmp_path: Path, other: Hardware) -> None:
    speed_of(MACHINE, {"Q4_K"}, tmp_path)
    assert remembered(other, tmp_path) is None


def test_free_memory_is_not_the_machine(engine: Engine, tmp_path: Path) -> None:
    speed_of(MACHINE, {"Q4_K"}, tmp_path)
    assert remembered(replace(MACHINE, memory_available=1), tmp_path)


def test_old_figures_are_measured_again_when_the_machine_is_quiet(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = speed_of(MACHINE, {"Q4_K", "Q6_K"}, tmp_path)
    now = time.time()
    for later in (5 * 7 * 86_400, -86_400):  # and a clock that was wrong
        monkeypatch.setattr(time, "time", lambda later=later: now + later)
        engine.others = 1.5
        asked = len(engine.asked)
        assert speed_of(MACHINE, {"Q4_K"}, tmp_path) == remembered(MACHINE, tmp_path) == quiet
        assert len(engine.asked) == asked
        engine.others = 0.0
        assert set(speed_of(MACHINE, {"Q4_K"}, tmp_path).types) == {"Q4_K", "Q6_K"}
        assert len(engine.asked) == asked + 1


def test_a_busy_machine_is_estimated_until_it_is_quiet(engine: Engine, tmp_path: Path) -> None:
    engine.others = 20.0
    busy = speed_of(MACHINE, {"Q4_K"}, tmp_path)
    assert (busy.is_estimated, busy.read) == (True, pytest.approx(3e10 / 1.1))
    assert [command.is_shared for command in engine.asked] == [True]
    assert speed_of(MACHINE, {"Q4_K"}, tmp_path) == busy, "two commands agree"
    engine.others = 0.0
    quiet = speed_of(MACHINE, {"Q4_K"}, tmp_path)
    assert (quiet.is_estimated, quiet.read) == (False, 3e10)
    engine.others = 20.0
    assert speed_of(MACHINE, {"Q4_K"}, tmp_path) == remembered(MACHINE, tmp_path) == quiet
    assert set(speed_of(MACHINE, {"Q6_K"}, tmp_path).types) == {"Q4_K", "Q6_K"}
    assert remembered(MACHINE, tmp_path) == quiet, "nothing is stored beside what a quiet machine has shown"


def test_a_machine_that_gets_busy_meanwhile_is_measured_again(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "other_programs", lambda: 0.0)
    engine.others = 20.0
    found = speed_of(MACHINE, {"Q4_K"}, tmp_path)
    assert [command.is_shared for command in engine.asked] == [False, True]
    assert (found.is_estimated, found.read) == (True, pytest.approx(3e10 / 1.1))


def test_lower_bounds_of_a_busy_machine_are_forgotten(engine: Engine, tmp_path: Path) -> None:
    """llmrun stored them once."""
    figures = as_dict(replace(ANSWER, others=1.5))
    del figures["is_estimated"]
    keep_measured("speed", machine_key(MACHINE), tmp_path, {"time": time.time(), "figures": figures})
    assert remembered(MACHINE, tmp_path) is None


@pytest.mark.parametrize("order", [(0.0, 1.5), (1.5, 0.9), (1.5, 3.0)])
def test_a_type_that_joins_at_another_moment_is_as_fast_as_the_others_were(
    engine: Engine, tmp_path: Path, order: tuple[float, float]
) -> None:
    engine.others = order[0]
    first = speed_of(MACHINE, {"Q4_K"}, tmp_path)
    engine.others = order[1]
    found = speed_of(MACHINE, {"Q4_K", "Q6_K"}, tmp_path)
    assert found.read == first.read
    assert found.types["Q4_K"] == first.types["Q4_K"]
    assert found.types["Q6_K"].prefill == pytest.approx(found.types["Q4_K"].prefill)
    assert found.types["Q6_K"].decode[-1][1] == pytest.approx(found.types["Q4_K"].decode[-1][1])


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"time": 0}', "null", "\0", "[" * 100_000])
def test_damaged_file(engine: Engine, tmp_path: Path, text: str) -> None:
    (tmp_path / MEASURED_FILE).write_text(text)
    assert remembered(MACHINE, tmp_path) is None
    assert speed_of(MACHINE, {"Q4_K"}, tmp_path)


def test_damaged_figures(engine: Engine, tmp_path: Path) -> None:
    good = as_dict(ANSWER)
    for figures in ({}, {**good, "types": {"Q4_K": {"decode": 3}}}, {**good, "others": "x"}):
        keep_measured("speed", machine_key(MACHINE), tmp_path, {"time": time.time(), "figures": figures})
        assert remembered(MACHINE, tmp_path) is None


def test_a_folder_that_can_not_be_written_is_no_trouble(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert speed_of(MACHINE, {"Q4_K"}, tmp_path / "file")


def test_others_are_counted_without_our_children(monkeypatch: pytest.MonkeyPatch) -> None:
    before = speed.Clock(wall=10.0, everybody=100.0, children=5.0)
    monkeypatch.setattr(speed.Clock, "now", classmethod(lambda cls: cls(12.0, 108.0, 8.0)))
    assert before.others() == pytest.approx(2.5)


def test_kernels_are_really_measured() -> None:
    """With llama.cpp itself, the smallest matrices, and whatever else is going on here."""
    found = measure(1, ["Q4_0", "F16", "NVFP9"])
    assert set(found.types) == {"Q4_0", "F16"}
    assert all(1e7 < rate < 1e13 for _, rate in found.types["Q4_0"].decode)
    assert 1e7 < found.types["F16"].prefill < 1e15
    assert 1e7 < found.read < 1e13
    assert 0 < found.operation < 0.1
    assert set(found.attention_seconds["F16"]) == set(found.attention_seconds["Q8_0"]) == {64, 96, 128, 256}
    assert all(0 < value < 1e-3 for table in found.prefill_attention_seconds.values() for value in table.values())


def test_processor_time_tells_the_speed_beside_busy_programs() -> None:
    """How long one thread computes hardly depends on what else runs; where two threads share a core, each is slower."""
    with closing(EngineClient()) as engine:
        found = []
        for n_busy in (0, 4):
            with busy_processes(n_busy):
                found.append(engine.do(KERNELS, MeasureKernels(1, ("Q8_0",), is_shared=True)))
    alone, beside = found
    assert 1 / 2 < alone.types["Q8_0"].prefill / beside.types["Q8_0"].prefill < 2
    assert 1 / 2 < alone.types["Q8_0"].decode[-1][1] / beside.types["Q8_0"].decode[-1][1] < 2

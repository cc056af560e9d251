"""The limit of a test: what it has to read and to multiply, counted by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support import gguf_writer
from support.gguf_writer import TensorSpec

from llmrun import _native
from llmrun.engine.jobs.machine import run_limits
from llmrun.gguf.reader import read_header
from llmrun.lab.bench.cases import bench_settings
from llmrun.lab.bench.limits import MachineLimits, limit_of, phases
from llmrun.planning.predict import Work, work_of
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.jobs.machine import MeasuredLimits, MeasureLimits

# A million weights of 4.5 bits and a tenth of that in f16; 10 heads of 64 elements in one layer, 1000 KV elements.
WORK = Work(
    decode_bytes={"Q4_0": 562_500.0, "F16": 200_000.0},
    prefill_weights={"Q4_0": 1_000_000.0},
    layers=1,
    full_layers=1,
    window_layers=0,
    window=0,
    kv_elements=1000,
    window_kv_elements=0,
    heads=10.0,
    head_length=64,
    vocabulary=100,
    file_bytes={},
)
SETTINGS = bench_settings()
MACHINE = MeasuredLimits(read=1e9, int8=1e12, half=1e11, single=1e10)


def limit(test: BenchTest, machine: MeasuredLimits = MACHINE) -> Any:
    return limit_of(phases(WORK, test, SETTINGS), machine)


def test_an_answer_reads_all_weights_and_the_cache() -> None:
    found = limit(BenchTest(0, 100, 1000))
    kv = 1050 * 1000 * 2.0
    assert found.kv_bytes_per_token == kv
    assert found.bytes_per_token == 762_500 + kv
    assert found.memory_ceiling == pytest.approx(1e9 / (762_500 + kv))
    assert (found.binds, found.tokens_per_second) == ("memory", found.memory_ceiling)
    assert found.read_rate == 1e9


def test_an_answer_multiplies_by_each_types_own_rate() -> None:
    found = limit(BenchTest(0, 2))
    attention = 2 * 10 * 1 * 64  # one position on average
    assert found.multiply_adds == 1_000_000 + 100_000 + attention
    assert 1 / found.compute_ceiling == pytest.approx(1e6 / 1e12 + (1e5 + attention) / 1e11)


def test_a_prompt_reads_the_weights_once_a_micro_batch_and_no_output_matrix_is_multiplied() -> None:
    found = limit(BenchTest(1024))
    attention = 2 * 10 * 512 * 64
    assert found.multiply_adds == 1_000_000 + attention
    assert found.bytes_per_token == pytest.approx((762_500 + 512 * 1000 * 2.0) / 512)
    assert found.compute_ceiling == pytest.approx(1 / (1e6 / 1e12 + attention / 1e11))
    assert limit(BenchTest(32)).bytes_per_token == pytest.approx((762_500 + 16 * 1000 * 2.0) / 32)


def test_the_lower_ceiling_binds() -> None:
    slow_memory = MeasuredLimits(1e6, 1e12, 1e11, 1e10)
    slow_compute = MeasuredLimits(1e12, 1e8, 1e8, 1e8)
    for test in (BenchTest(512), BenchTest(0, 64)):
        assert limit(test, slow_memory).binds == "memory"
        assert limit(test, slow_compute).binds == "compute"
        for machine in (slow_memory, slow_compute):
            found = limit(test, machine)
            assert found.tokens_per_second == pytest.approx(min(found.memory_ceiling, found.compute_ceiling))


def test_phases_of_a_mixed_test_add_up() -> None:
    both = limit(BenchTest(512, 64))
    seconds = 512 / limit(BenchTest(512)).tokens_per_second + 64 / limit(BenchTest(0, 64, 512)).tokens_per_second
    assert both.tokens_per_second == pytest.approx(576 / seconds)
    assert both.tokens_per_second <= min(both.memory_ceiling, both.compute_ceiling)


def test_a_processor_whose_products_are_unknown_is_bound_by_memory() -> None:
    found = limit(BenchTest(0, 8), MeasuredLimits(1e9, 0.0, 0.0, 0.0))
    assert (found.binds, found.compute_ceiling, found.compute_rate) == ("memory", 0.0, 0.0)


def test_what_a_model_needs_is_in_its_header(tmp_path: Path) -> None:
    q8 = TensorSpec("blk.0.attn_q.weight", (64, 64), 8, 64 * 64 // 32 * 34)
    path = gguf_writer.write(tmp_path / "m.gguf", gguf_writer.tiny_model({}, [q8]))
    (phase,) = phases(work_of(read_header(path)), BenchTest(0, 1), SETTINGS)
    assert (phase.weight_bytes, phase.products["int8"]) == (64 * 64 // 32 * 34, 64 * 64)


# ---- measuring -------------------------------------------------------------------------------------


def test_the_machines_best_counts_and_is_looked_for_three_times() -> None:
    rates = iter([3e9, 5e9, 4e9])
    asked: list[MeasureLimits] = []

    def measure(command: MeasureLimits) -> MeasuredLimits:
        asked.append(command)
        return MeasuredLimits(next(rates), 1.0, 1.0, 1.0)

    machine = MachineLimits(measure)
    assert [machine.at(1e8, 2).read for _ in range(5)] == [3e9, 5e9, 5e9, 5e9, 5e9]
    assert len(asked) == 3


def test_other_threads_and_other_sizes_are_measured_apart_but_products_only_by_threads() -> None:
    asked: list[MeasureLimits] = []

    def measure(command: MeasureLimits) -> MeasuredLimits:
        asked.append(command)
        return MeasuredLimits(float(command.n_bytes), float(len(asked)), 1.0, 1.0)

    machine = MachineLimits(measure)
    assert machine.at(1e8, 1).read < machine.at(2e8, 1).read
    assert machine.at(1e8, 2).int8 == 3.0
    assert machine.at(1e8, 1).int8 == 4.0
    assert machine.at(1e12, 1).read == 1 << 30, "more is in no cache either way"
    assert machine.at(0, 1).read == 1 << 20


def test_nearly_the_same_size_is_the_same_measurement() -> None:
    asked: set[MeasureLimits] = set()

    def measure(command: MeasureLimits) -> MeasuredLimits:
        asked.add(command)
        return MACHINE

    machine = MachineLimits(measure)
    for n_bytes in (96.7e6, 96.8e6, 97.0e6):
        machine.at(n_bytes, 1)
    assert len(asked) == 1
    (command,) = asked
    assert 0.95 < command.n_bytes / 96.8e6 <= 1


def test_this_machine_can_be_measured() -> None:
    found = run_limits(MeasureLimits(1 << 22, 2, 0.03), lambda update: None, _native.CancelFlag())
    assert found.read > 1e7
    assert math.isfinite(found.read)
    assert found.single > 1e7
    assert found.half > 1e7
    assert found.int8 >= 0


@pytest.mark.parametrize(("kind", "threads"), [("double", 1), ("", 1), ("int8", 0)])
def test_native_refuses_what_it_does_not_know(kind: str, threads: int) -> None:
    with pytest.raises(ValueError, match="int8, half or single"):
        _native.multiply_add_rate(kind, threads, 0.0)
    with pytest.raises(ValueError, match="something to read"):
        _native.read_rate(0, threads, 0.0)

"""Which layers lie on which machine, and what the network between them costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.model_facts import Facts

from llmrun.errors import OutOfMemoryError
from llmrun.planning.hardware import Hardware
from llmrun.planning.plan import LoadPreferences, Plan, make_plan
from llmrun.planning.predict import Work, predict
from llmrun.planning.rpc import divide, network_cost, part_of, predict_over_workers
from llmrun.planning.split import ALL_LAYERS
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.kernels import MachineSpeed, Rates
from llmrun.runner.workers import RpcLink, RpcWorker, WorkerDevice

GIB = 1 << 30


# Of the size of a dense model of 32B in Q4_K_M.
MODEL = Facts(
    weight_bytes=19 * GIB,
    n_embd=5120,
    n_vocab=151_936,
    n_layers=63,
    kv_bytes=131_072.0,
    n_parameters=32_000_000_000,
    key_length=128,
    most_heads=40,
)


HERE = Hardware("a processor", ("avx2",), 8, 16, None, 16 * GIB, 12 * GIB)


def worker(name: str, *free: int) -> RpcWorker:
    return RpcWorker(f"{name}:50052", tuple(WorkerDevice(each, each) for each in free), 1e-3)


def planned(*workers: RpcWorker, wish: int | None = None, gpus: tuple[Gpu, ...] = (), here: int = 12 * GIB) -> Plan:
    hardware = replace(HERE, workers=workers, gpus=gpus, memory_available=here)
    return make_plan(MODEL, hardware, LoadPreferences(gpu_layers=wish))


def test_layers_in_proportion_to_free_memory() -> None:
    plan = planned(worker("a", 12 * GIB), worker("b", 24 * GIB))
    assert plan.workers == ("a:50052", "b:50052")
    first, second = plan.layer_counts
    assert sum(plan.layer_counts) == plan.gpu_layers < 64
    assert 1.8 < second / first < 2.2
    assert 0.7 < (64 - plan.gpu_layers) / first < 1.1
    assert plan.notes == (
        f"layers 1-{64 - plan.gpu_layers} here, {65 - plan.gpu_layers}-{64 - second} on a:50052, "
        f"{65 - second}-64 on b:50052; 64 in all, the last is the output",
    )


def test_what_the_engine_is_told() -> None:
    plan = planned(worker("a", 24 * GIB, 8 * GIB))
    load = plan.load(Path("/model.gguf"))
    assert (load.workers, load.layer_counts) == (("a:50052",), plan.layer_counts)
    assert len(load.layer_counts) == 2
    assert load.n_ctx_start == load.n_ctx


def test_a_gpu_here_leaves_nothing_to_the_processor() -> None:
    plan = planned(worker("a", 24 * GIB), gpus=(Gpu("CUDA0", "a card", 16 * GIB, 16 * GIB),))
    assert plan.gpu_layers == ALL_LAYERS
    assert sum(plan.layer_counts) == 64
    assert "on CUDA0 here" not in plan.notes[0]
    assert "CUDA0 here" in plan.notes[0]
    assert 0 < plan.vram_bytes < 16 * GIB


def test_without_workers_it_does_not_fit() -> None:
    with pytest.raises(OutOfMemoryError):
        make_plan(MODEL, HERE, LoadPreferences())


def test_workers_that_are_too_small() -> None:
    with pytest.raises(OutOfMemoryError):
        planned(worker("a", 2 * GIB))


@pytest.mark.parametrize(("wish", "count"), [(0, 0), (5, 5), (ALL_LAYERS, 64), (99, 64)])
def test_the_user_says_how_many_layers_leave(wish: int, count: int) -> None:
    plan = planned(worker("a", 40 * GIB), worker("b", 40 * GIB), wish=wish, here=40 * GIB)
    assert sum(plan.layer_counts) == count
    assert plan.gpu_layers == (ALL_LAYERS if count == 64 else count)


def test_more_memory_there_never_means_fewer_layers_there() -> None:
    counts = [planned(worker("a", size * GIB), here=30 * GIB).gpu_layers for size in range(1, 60)]
    assert all(before <= after for before, after in pairwise(counts))
    assert counts[0] < counts[-1]


@pytest.mark.parametrize(
    ("layers", "rooms", "counts"),
    [
        (31, (10, 10, 10), (11, 10, 10)),
        (30, (10, 20, 30), (5, 10, 15)),
        (30, (100, 0, 100), (15, 0, 15)),
        (7, (0, 3, 3), (1, 3, 3)),
        (4, (0, 0), (4, 0)),
    ],
)
def test_divide(layers: int, rooms: tuple[int, ...], counts: tuple[int, ...]) -> None:
    assert divide(layers, rooms) == counts


# ---- speed -----------------------------------------------------------------------------------------

SPEED = MachineSpeed(
    read=1e9,
    operation=1e-6,
    looks={"F16": {64: 1e-8}},
    prefill_looks={"F16": {64: 1e-9}},
    types={"Q4_K": Rates(((1e6, 2e9),), 1e10), "Q6_K": Rates(((1e6, 1e9),), 1e10)},
)
SLOW = replace(SPEED, types={kind: Rates(((1e6, 1e8),), 1e9) for kind in SPEED.types})
WORK = Work(
    decode_bytes={"Q4_K": 2e8, "Q6_K": 4e7},
    prefill_weights={"Q4_K": 4e8},
    layers=30,
    full_layers=30,
    window_layers=0,
    window=0,
    kv_elements=1000,
    window_kv_elements=0,
    heads=8.0,
    head_length=64,
    vocabulary=32_000,
    file_bytes={"Q4_K": 2e8, "Q6_K": 4e7},
    output_bytes={"Q6_K": 4e7},
    width=2048,
)


def linked(round_trip: float, rate: float, *names: str) -> Hardware:
    devices = (WorkerDevice(GIB, GIB),)
    link = RpcLink(rate, rate)
    return replace(HERE, workers=tuple(RpcWorker(f"{name}:1", devices, round_trip, link) for name in names))


def test_the_parts_of_the_work_are_the_whole() -> None:
    first, last = part_of(WORK, 1 / 3, with_output=False), part_of(WORK, 2 / 3, with_output=True)
    for kind, size in WORK.decode_bytes.items():
        assert first.decode_bytes[kind] + last.decode_bytes[kind] == pytest.approx(size)
    assert first.decode_bytes["Q6_K"] == 0
    assert first.kv_read(100) + last.kv_read(100) == pytest.approx(WORK.kv_read(100))


def test_like_machines_without_distance_are_as_fast_as_one_but_for_the_messages() -> None:
    near, speeds = linked(0.0, 1e15, "a", "b"), (SPEED,) * 3
    found = predict_over_workers(WORK, speeds, near, (10, 10), depth=100)
    alone = predict(WORK, SPEED, depth=100)
    messages = network_cost(WORK, near, (10, 10)).seconds
    assert 1 / found.decode_rate == pytest.approx(1 / alone.decode_rate + messages)
    assert messages < 1e-3


def test_each_worker_with_layers_adds_a_round_trip() -> None:
    far = linked(0.020, 1e15, "a", "b", "c")
    near = linked(0.0, 1e15, "a", "b", "c")
    for counts, trips in (((10, 10, 10), 3), ((10, 0, 10), 2), ((0, 0, 0), 0)):
        cost = network_cost(WORK, far, counts)
        assert cost.round_trips == trips
        assert cost.seconds - network_cost(WORK, near, counts).seconds == pytest.approx(0.020 * trips)


def test_the_last_worker_sends_the_logits() -> None:
    hardware = linked(0.0, 1e6, "a", "b")
    logits, hidden = 4 * WORK.vocabulary, 4 * WORK.width
    one, both = network_cost(WORK, hardware, (20, 0)), network_cost(WORK, hardware, (10, 10))
    assert logits + hidden < one.n_bytes < logits + hidden + 5000
    assert both.n_bytes - one.n_bytes == pytest.approx(2 * hidden, abs=5000)
    assert one.seconds > logits / 1e6


def test_a_slow_worker_makes_it_slow_by_its_share() -> None:
    near = linked(0.0, 1e15, "a")
    rates = [predict_over_workers(WORK, (SPEED, SLOW), near, (count,)).decode_rate for count in (0, 1, 10, 20, 30)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 5 * rates[-1]


def test_a_prompt_crosses_the_network_once() -> None:
    far, near = linked(0.1, 1e6, "a"), linked(0.0, 1e15, "a")
    slow, fast = (1 / predict_over_workers(WORK, (SPEED,) * 2, each, (15,)).prefill_rate for each in (far, near))
    hidden, logits = 512 * 4 * WORK.width / 1e6, 4 * WORK.vocabulary / 1e6
    assert 512 * (slow - fast) == pytest.approx(0.1 + hidden + logits, rel=0.4)


def test_loading_sends_the_weights() -> None:
    hardware = linked(0.0, 1e8, "a")
    without, half = (predict_over_workers(WORK, (SPEED,) * 2, hardware, (count,)).load_seconds for count in (0, 15))
    assert half - without == pytest.approx(2.4e8 * 15 / 31 / 1e8)


def test_a_full_gpu_here_changes_nothing() -> None:
    near, speeds = linked(0.0, 1e15, "a"), (SPEED,) * 2
    assert predict_over_workers(WORK, speeds, near, (10, 0)) == predict_over_workers(WORK, speeds, near, (10,))

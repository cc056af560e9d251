"""Which layers lie on which machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.model_facts import Facts

from llmrun.errors import OutOfMemoryError
from llmrun.planning.hardware import Hardware
from llmrun.planning.plan import LoadPreferences, Plan, make_plan
from llmrun.planning.rpc import divide
from llmrun.planning.split import ALL_LAYERS
from llmrun.protocol.devices import Gpu
from llmrun.runner.workers import RpcWorker, WorkerDevice

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
    return RpcWorker(f"{name}:50052", tuple(WorkerDevice(each, each) for each in free))


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

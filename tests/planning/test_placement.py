"""Where a mixture of experts lies: experts stay with the processor before layers do, and nothing is counted twice."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.model_facts import Facts
from support.random_model import write_random_model

from llmrun.errors import OutOfMemoryError, UsageError
from llmrun.gguf.layers import LayerShares
from llmrun.gguf.reader import read_header
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import DEVICE_BATCH, UBATCH, memory, reserved_bytes
from llmrun.planning.placement import Split, described, divide, split_model
from llmrun.planning.plan import Plan, make_plan
from llmrun.planning.preferences import ALL_LAYERS, LoadPreferences
from llmrun.planning.tuned import SPINS, waiting_environment
from llmrun.protocol.devices import Gpu
from llmrun.protocol.loading import Load
from llmrun.runner.workers import RpcWorker

GIB = 1 << 30
N_CTX = 8192


# A mixture of the size of Qwen3-30B-A3B in Q4_K_M: 16.5 of 17.3 GiB are experts.
MIXTURE = Facts(
    weight_bytes=48 * 352 * (1 << 20) + GIB,
    n_ctx_train=40_960,
    n_embd=2048,
    n_vocab=151_936,
    kv_bytes=49_152.0,
    n_layers=48,
    n_parameters=30_500_000_000,
    key_length=128,
    most_heads=32,
    expert_bytes=dict.fromkeys(range(48), 352 * (1 << 20)),
)
DENSE = replace(MIXTURE, expert_bytes={})


def split(*free: int, wish: int | None = None, experts: int | None = None, facts: Facts = MIXTURE) -> Split:
    gpus = tuple(Gpu(f"CUDA{number}", "NVIDIA Imaginary", 80 * GIB, each) for number, each in enumerate(free))
    return place(facts, N_CTX, gpus, LoadPreferences(gpu_layers=wish, cpu_experts=experts))


def place(facts: Facts, n_ctx: int, gpus: tuple[Gpu, ...], preferences: LoadPreferences) -> Split:
    hardware = Hardware("CPU", (), 4, 8, None, 64 * GIB, 60 * GIB, gpus)
    return split_model(facts, memory(facts, n_ctx), n_ctx, hardware, preferences)


def test_a_gpu_that_holds_everything_gets_the_experts_too() -> None:
    assert (split(24 * GIB).gpu_layers, split(24 * GIB).cpu_experts) == (ALL_LAYERS, ())


@pytest.mark.parametrize("free", [4 * GIB, 8 * GIB, 12 * GIB, 16 * GIB])
def test_experts_stay_behind_before_layers_do_and_no_more_than_have_to(free: int) -> None:
    found = split(free)
    assert found.gpu_layers == ALL_LAYERS
    assert found.vram <= free
    left = len(found.cpu_experts)
    assert 0 < left < 48
    assert split(free, experts=left).vram <= free - 256 * (1 << 20) < split(free, wish=-1, experts=left - 1).vram
    assert split(free, facts=DENSE).gpu_layers < 48


def test_where_even_attention_does_not_fit_layers_stay_behind_too() -> None:
    found = split(GIB)
    assert 0 < found.gpu_layers < 48
    assert len(found.cpu_experts) == 48


@pytest.mark.parametrize("free", [0, GIB, 4 * GIB, 12 * GIB, 24 * GIB])
def test_every_byte_is_on_one_side(free: int) -> None:
    needs, found = memory(MIXTURE, N_CTX), split(free)
    copied = 352 * (1 << 20) if found.cpu_experts else 0
    scratch = reserved_bytes(MIXTURE, N_CTX) + copied if found.vram else 0
    assert found.ram + found.vram == needs.needed + scratch


class Windowed(Facts):
    """A model whose last layers have windows, so that the first ones have the KV cache."""

    def cache_shares(self, n_tokens: int, bytes_per_element: float = 2.0, **sizes: int) -> tuple[float, ...]:
        return (*[0.1] * 10, *[0.0] * (self.n_layers - 10))


def test_each_layer_takes_its_own_part_of_the_kv_cache() -> None:
    facts = Windowed(**{each.name: getattr(DENSE, each.name) for each in fields(DENSE)})
    kv = memory(DENSE, N_CTX).kv
    even, found = split(80 * GIB, wish=38, facts=DENSE), split(80 * GIB, wish=38, facts=facts)
    assert even.vram - found.vram == pytest.approx(kv * 37 / 48, rel=0.01)  # one of the 38 is the output
    assert split(80 * GIB, facts=facts).vram == pytest.approx(split(80 * GIB, facts=DENSE).vram)
    free = found.vram + GIB
    assert split(free, facts=facts).gpu_layers > split(free, facts=DENSE).gpu_layers


def test_several_gpus_have_as_much_less_to_hold_each() -> None:
    left = split(6 * GIB, 6 * GIB).cpu_experts
    in_first_half = sum(layer < 24 for layer in left)
    assert abs(2 * in_first_half - len(left)) <= 1


@pytest.mark.parametrize(("wish", "layers"), [(0, 0), (5, 5), (48, 48), (200, 48)])
def test_wished_experts(wish: int, layers: int) -> None:
    found = split(80 * GIB, experts=wish)
    assert (found.gpu_layers, len(set(found.cpu_experts))) == (ALL_LAYERS, layers)


def test_who_says_how_many_layers_gets_them_whole() -> None:
    assert split(8 * GIB, wish=10) == split(8 * GIB, wish=10, experts=0)
    assert split(8 * GIB, wish=10).cpu_experts == ()


def test_without_gpus_there_is_nothing_to_split() -> None:
    assert split() == split(experts=7)
    assert split().cpu_experts == ()


def machine(free: int) -> Hardware:
    gpus = (Gpu("CUDA0", "NVIDIA Imaginary", 80 * GIB, free),) if free else ()
    return Hardware("CPU", (), 4, 8, None, 64 * GIB, 60 * GIB, gpus)


def test_the_plan_says_it_and_tells_the_engine() -> None:
    plan = make_plan(MIXTURE, machine(8 * GIB), LoadPreferences(n_ctx=N_CTX))
    count = len(plan.load.cpu_experts)
    assert plan.notes == (
        f"all layers on the GPU but for the experts of {count}: what fits into its 8.6 GB of free memory",
    )
    assert f"all layers on the GPU but for the experts of {count}" in plan.summary
    assert plan.load.cpu_experts == plan.load.cpu_experts


@pytest.mark.parametrize(
    ("facts", "free", "why"), [(DENSE, 8 * GIB, "no experts"), (MIXTURE, 0, "nothing is on a GPU")]
)
def test_a_wish_that_changes_nothing_is_said(facts: Facts, free: int, why: str) -> None:
    plan = make_plan(facts, machine(free), LoadPreferences(n_ctx=N_CTX, cpu_experts=3))
    assert plan.notes[-1] == f"--n-cpu-moe changes nothing: {why}"


def test_a_wish_out_of_bounds_is_refused() -> None:
    with pytest.raises(UsageError, match="--n-cpu-moe -1"):
        LoadPreferences(cpu_experts=-1)


def test_words() -> None:
    assert described(ALL_LAYERS, 0) == "all layers on the GPU"
    assert described(5, 48) == "5 layers on the GPU but for the experts of 48"


# ---- what llama.cpp allocates ----------------------------------------------------------------------

# SmolLM2-135M in Q4_1: its token embeddings are its output matrix too.
BLOCK, OUTPUT, LARGEST = 2_216_448, 30_081_024, 553_000
SMOL = replace(
    Facts(),
    weight_bytes=96_576_768,
    shares=LayerShares(
        (*(BLOCK / 96_576_768 for _ in range(30)), OUTPUT / 96_576_768),
        OUTPUT / 96_576_768,
        LARGEST / 96_576_768,
    ),
)
# llama.cpp's figures in MB, on Vulkan: layers, GPUs, window, flash attention -> each GPU's buffers, all allocated.
ALLOCATED = [
    (ALL_LAYERS, 1, 8192, "auto", [305.5]),
    (15, 1, 8192, "auto", [171.9]),
    (1, 1, 8192, "auto", [52.8]),
    (0, 1, 8192, "auto", [22.8]),
    (ALL_LAYERS, 1, 4096, "off", [278.0]),
    (15, 1, 2048, "off", [130.0]),
    (ALL_LAYERS, 2, 8192, "auto", [186.2, 199.3]),
    (15, 2, 8192, "auto", [90.8, 101.3]),
]


@pytest.mark.parametrize(("layers", "count", "n_ctx", "flash_attention", "allocated"), ALLOCATED)
def test_the_plan_is_within_a_tenth_of_what_llama_cpp_allocates(
    layers: int, count: int, n_ctx: int, flash_attention: str, allocated: list[float]
) -> None:
    gpus = tuple(Gpu(f"Vulkan{number}", "Card", 2 * GIB, 2 * GIB) for number in range(count))
    preferences = LoadPreferences(gpu_layers=layers, flash_attention=flash_attention)
    found = place(SMOL, n_ctx, gpus, preferences)
    assert [size / 1e6 for _, size in found.gpu_bytes] == pytest.approx(allocated, rel=0.1)


def test_a_gpu_with_the_output_alone_has_no_activations() -> None:
    gpus = tuple(Gpu(f"Vulkan{number}", "Card", 2 * GIB, 2 * GIB) for number in range(2))
    (_, first), (_, last) = place(SMOL, 2048, gpus, LoadPreferences(gpu_layers=2)).gpu_bytes
    assert first > last - OUTPUT
    assert OUTPUT < last < OUTPUT + 4_000_000


@pytest.mark.parametrize(("free", "is_said"), [(2 * GIB, True), (80 * GIB, False)])
def test_layers_that_were_asked_for_and_do_not_fit_are_said(free: int, is_said: bool) -> None:
    plan = make_plan(DENSE, machine(free), LoadPreferences(n_ctx=N_CTX, gpu_layers=99))
    assert plan.load.gpu_layers == ALL_LAYERS
    assert any("CUDA0 has 2.1 GB free, but this takes" in note for note in plan.notes) == is_said


def test_attention_scores_are_on_the_gpu_whose_layers_need_them() -> None:
    plain, without = (
        make_plan(DENSE, machine(80 * GIB), LoadPreferences(n_ctx=N_CTX, flash_attention=flash))
        for flash in ("auto", "off")
    )
    assert without.vram_bytes - plain.vram_bytes > 400 << 20
    assert without.ram_bytes == plain.ram_bytes


@pytest.mark.parametrize(("free", "n_ubatch"), [(20 * GIB, DEVICE_BATCH), (3 * GIB // 2, UBATCH)])
def test_micro_batches_are_wide_where_a_gpu_has_memory_to_spare(free: int, n_ubatch: int) -> None:
    model = replace(DENSE, weight_bytes=min(DENSE.weight_bytes, free // 8))
    plan = make_plan(model, machine(free), LoadPreferences(n_ctx=N_CTX))
    assert (plan.load.gpu_layers, plan.load.n_batch, plan.load.n_ubatch) == (ALL_LAYERS, DEVICE_BATCH, n_ubatch)
    assert plan.load.n_ubatch == n_ubatch
    given = make_plan(model, machine(free), LoadPreferences(n_ctx=N_CTX, n_ubatch=UBATCH))
    assert (given.load.n_batch, given.load.n_ubatch) == (DEVICE_BATCH, UBATCH)
    large = make_plan(model, machine(free), LoadPreferences(n_ctx=N_CTX, n_batch=2 * DEVICE_BATCH))
    assert (large.load.n_batch, large.load.n_ubatch) == (2 * DEVICE_BATCH, n_ubatch)
    narrow = make_plan(model, machine(free), LoadPreferences(n_ctx=N_CTX, n_batch=256))
    assert (narrow.load.n_batch, narrow.load.n_ubatch) == (256, 256)


TWO = tuple(Gpu(f"Vulkan{number}", "Card", 2 * GIB, 2 * GIB) for number in range(2))
# llama.cpp's figures in MB for tests/support/random_model.py on two Vulkan devices: settings, buffers of each.
DIVIDED: list[tuple[dict[str, Any], list[float]]] = [
    ({}, [37.8, 28.1]),
    ({"split_mode": "none", "main_gpu": 1}, [39.6]),
    ({"split_mode": "tensor"}, [25.2, 25.2]),
    ({"tensor_split": "3/1"}, [47.8, 0.4]),
    ({"device": "Vulkan1"}, [39.6]),
    ({"override_tensor": r"blk\.0=Vulkan1"}, [25.9, 23.6]),
    ({"override_tensor": "ffn_(up|down)=CPU"}, [22.0, 11.3]),
]


@pytest.mark.parametrize(("settings", "allocated"), DIVIDED)
def test_divisions_are_planned_as_llama_cpp_allocates_them(
    settings: dict[str, Any], allocated: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmrun.planning.plan.DEVICE_BATCH", UBATCH)  # the figures are of micro-batches of 512
    header = read_header(write_random_model(tmp_path / "random.gguf"))
    machine = Hardware("CPU", (), 4, 8, None, 64 * GIB, 60 * GIB, TWO)
    plan = make_plan(header, machine, LoadPreferences(n_ctx=2048, **settings))
    assert [size / 1e6 for _, size in plan.gpu_bytes] == pytest.approx(allocated, rel=0.1, abs=5)
    load = plan.load
    assert all(getattr(load, name) == value for name, value in settings.items())


def test_a_tensor_is_counted_where_it_is_put() -> None:
    shares = LayerShares((0.4, 0.4, 0.1), tensors={"token_embd": (-1, 0.1), "a.up": (0, 0.3)})
    facts = replace(DENSE, n_layers=2, weight_bytes=GIB, shares=shares)

    def placed(text: str) -> Split:
        return place(facts, 512, TWO[:1], LoadPreferences(gpu_layers=ALL_LAYERS, override_tensor=text))

    plain, up, embeddings = placed(""), placed(r"\.up=CPU"), placed("token_embd=Vulkan0")
    assert up.ram - plain.ram == pytest.approx(0.3 * GIB, abs=2)
    assert plain.ram - embeddings.ram == embeddings.vram - plain.vram == pytest.approx(0.1 * GIB, abs=2)


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="CUDA9") as caught:
        make_plan(DENSE, machine(8 * GIB), LoadPreferences(override_tensor="x=CUDA9"))
    assert "CPU, CUDA0" in caught.value.why


def test_devices_and_workers_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="--rpc and --device can't"):
        LoadPreferences(device="CUDA0", workers=("host:1",))
    with pytest.raises(UsageError, match="needs flash attention"):
        LoadPreferences(split_mode="tensor", flash_attention="off")


def test_threads_wait_awake_where_the_processor_and_a_gpu_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    alone = Load("model.gguf", N_CTX)
    hybrid = replace(alone, cpu_experts=(0, 1))
    assert waiting_environment(alone) == {}
    assert int(waiting_environment(hybrid)["GOMP_SPINCOUNT"]) > SPINS
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert waiting_environment(hybrid) == {}


# ---- which layers lie on which machine


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
    return RpcWorker(f"{name}:50052", free, sum(free))


def planned(*workers: RpcWorker, wish: int | None = None, gpus: tuple[Gpu, ...] = (), here: int = 12 * GIB) -> Plan:
    hardware = replace(HERE, workers=workers, gpus=gpus, memory_available=here)
    return make_plan(MODEL, hardware, LoadPreferences(gpu_layers=wish))


def test_layers_in_proportion_to_free_memory() -> None:
    plan = planned(worker("a", 12 * GIB), worker("b", 24 * GIB))
    assert plan.load.workers == ("a:50052", "b:50052")
    first, second = plan.load.layer_counts
    assert sum(plan.load.layer_counts) == plan.load.gpu_layers < 64
    assert 1.8 < second / first < 2.2
    assert 0.7 < (64 - plan.load.gpu_layers) / first < 1.1
    assert plan.notes == (
        f"layers 1-{64 - plan.load.gpu_layers} here, {65 - plan.load.gpu_layers}-{64 - second} on a:50052, "
        f"{65 - second}-64 on b:50052; 64 in all, the last is the output",
    )


def test_what_the_engine_is_told() -> None:
    plan = planned(worker("a", 24 * GIB, 8 * GIB))
    load = plan.load
    assert (load.workers, load.layer_counts) == (("a:50052",), plan.load.layer_counts)
    assert len(load.layer_counts) == 2


def test_a_gpu_here_leaves_nothing_to_the_processor() -> None:
    plan = planned(worker("a", 24 * GIB), gpus=(Gpu("CUDA0", "a card", 16 * GIB, 16 * GIB),))
    assert plan.load.gpu_layers == ALL_LAYERS
    assert sum(plan.load.layer_counts) == 64
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
    assert sum(plan.load.layer_counts) == count
    assert plan.load.gpu_layers == (ALL_LAYERS if count == 64 else count)


def test_more_memory_there_never_means_fewer_layers_there() -> None:
    counts = [planned(worker("a", size * GIB), here=30 * GIB).load.gpu_layers for size in range(1, 60)]
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

"""The plan against the buffers that llama.cpp allocated on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.architectures import Case, answers
from support.gpu_loader import Loader, on_gpus
from support.random_model import write_random_model

from llmrun.protocol.devices import Gpu

WINDOW = {"block_count": 6, "embedding_length": 256, "feed_forward_length": 1024, "attention.sliding_window": 128}
TABLE: list[str] = []
# Name -> model, preferences; two devices where "device" is "".
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers": ("dense", {"gpu_layers": -1}),
    "all layers without flash attention": ("dense", {"gpu_layers": -1, "flash_attention": "off"}),
    "3 layers": ("dense", {"gpu_layers": 3}),
    "1 layer": ("dense", {"gpu_layers": 1}),
    "no layers": ("dense", {"gpu_layers": 0}),
    "mixture": ("mixture", {"gpu_layers": -1}),
    "mixture, experts of 2 on the processor": ("mixture", {"gpu_layers": -1, "cpu_experts": 2}),
    "sliding window": ("gemma3", {"gpu_layers": -1}),
    "hybrid": ("lfm2", {"gpu_layers": -1}),
    "two GPUs": ("dense", {"gpu_layers": -1, "device": ""}),
    "two GPUs, 3/1": ("dense", {"gpu_layers": -1, "device": "", "tensor_split": "3/1"}),
    "two GPUs, by tensors": ("dense", {"gpu_layers": -1, "device": "", "split_mode": "tensor"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    hybrid = {**WINDOW, "attention.head_count_kv": [0, 1, 0, 1, 0, 1]}  # a layer without KV heads is recurrent
    answers(folder, {"gemma3": Case("gemma3", WINDOW), "lfm2": Case("lfm2", hybrid)})
    return {
        "dense": write_random_model(folder / "dense.gguf"),
        "mixture": write_random_model(folder / "mixture.gguf", experts=4),
        **{name: folder / f"{name}.gguf" for name in ("gemma3", "lfm2")},
    }


@pytest.mark.parametrize("name", CASES)
def test_buffers_are_within_a_tenth_of_the_plan(
    load: Loader, gpus: tuple[Gpu, ...], models: dict[str, Path], name: str
) -> None:
    kind, preferred = CASES[name]
    if preferred.get("device") == "" and len(gpus) < 2:
        pytest.skip("needs two GPUs")
    planned, allocated = on_gpus(load(models[kind], n_ctx=2048, **preferred))
    TABLE.append(f"{name:40} {planned / 1e6:8.1f} {allocated / 1e6:8.1f} {planned / allocated - 1:+7.1%}")
    assert allocated == pytest.approx(planned, rel=0.1)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{'case':40} {'plan MB':>8} {'held MB':>8} {'error':>7}", *TABLE, sep="\n")

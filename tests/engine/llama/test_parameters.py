"""Contexts that can't be created: the cause, and the flags that help."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.gguf_writer import runnable_model, write
from support.random_model import write_random_model

from llmrun import _native
from llmrun.engine.llama import devices as module
from llmrun.engine.llama import parameters
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.devices import Device, DeviceParameters
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.llama.parameters import out_of_memory
from llmrun.errors import UsageError
from llmrun.protocol.devices import Gpu
from llmrun.protocol.loading import DeviceBuffer, Load
from llmrun.protocol.settings import EngineSettings


@pytest.mark.parametrize(("flag", "kinds"), [("k", ("q8_0", "f16")), ("v", ("f16", "q8_0"))])
def test_a_kv_type_whose_blocks_are_longer_than_a_head_is_a_usage_error(
    tmp_path: Path, flag: str, kinds: tuple[str, str]
) -> None:
    path = write(tmp_path / "tiny.gguf", runnable_model())  # heads of 16
    model = LlamaModel(str(path), 0, _native.CancelFlag())
    load = Load(str(path), 64, kv_type_k=kinds[0], kv_type_v=kinds[1])
    try:
        with pytest.raises(UsageError, match=f"--cache-type-{flag} q8_0 does not suit this model") as caught:
            LlamaContext(model, load)
        assert caught.value.why == (
            f"it is stored in blocks of 32 elements, and the model's {'key' if flag == 'k' else 'value'} heads have 16"
        )
        LlamaContext(model, replace(load, kv_type_k="f16", kv_type_v="f16")).close()
    finally:
        model.close()


LOAD = Load("/model.gguf", 8192)


@pytest.mark.parametrize(
    ("load", "hint"),
    [
        (LOAD, "-ngl.*-ctk q8_0.*--ctx"),
        (replace(LOAD, kv_type_k="q8_0", kv_type_v="q8_0"), "^(?!.*-ctk).*-ngl.*--ctx"),
        (replace(LOAD, gpu_layers=0), "^(?!.*-ngl).*-ctk.*--ctx"),
    ],
)
def test_too_little_memory_on_a_gpu_names_what_helps_most_first(
    monkeypatch: pytest.MonkeyPatch, load: Load, hint: str
) -> None:
    monkeypatch.setattr(parameters, "gpus", lambda: (Gpu("CUDA0", "Card", 8 << 30, 6 << 30),))
    error = out_of_memory(load, 8192, DeviceBuffer("CUDA0", 5_000_000_000))
    assert error.why == "CUDA0 can't allocate 5.0 GB"
    assert re.search(hint, error.hint)


@pytest.mark.parametrize("failed", [None, DeviceBuffer("CPU", 5_000_000_000)])
def test_too_little_memory_elsewhere_names_the_window(failed: DeviceBuffer | None) -> None:
    assert out_of_memory(LOAD, 8192, failed).hint == "ask for a smaller one with --ctx"


# ---- device settings as llama.cpp gets them, and what it can't do


LLAMA = SimpleNamespace(llama_max_devices=lambda: 4)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    there = (Device("CPU", "cpu", 0, 10), Device("CUDA0", "card", 1, 11), Device("CUDA1", "card", 1, 12))
    functions = {
        "ggml_backend_dev_buffer_type": lambda pointer: pointer + 100,
        "ggml_backend_dev_backend_reg": lambda pointer: 1,
        "ggml_backend_reg_get_proc_address": lambda registry, name: 0,
    }
    monkeypatch.setattr(module, "devices", lambda: there)
    monkeypatch.setattr(module, "function", lambda name, *types: functions[name])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model") / "two_kv_heads.gguf", layers=1)


def applied(path: Path, experts: str = "", **settings: Any) -> tuple[Any, DeviceParameters]:
    params, chosen = SimpleNamespace(), DeviceParameters(EngineSettings(**settings), experts, ())
    chosen.apply(LLAMA, params, path)
    return params, chosen


def test_names_become_pointers_that_end_with_null(path: Path) -> None:
    params, _kept = applied(path, device="CUDA1/CUDA0", main_gpu=1, split_mode="none")
    assert list((ctypes.c_void_p * 3).from_address(params.devices)) == [12, 11, None]
    assert (params.split_mode, params.main_gpu) == (0, 1)
    params, _kept = applied(path, device="none")
    assert list((ctypes.c_void_p * 1).from_address(params.devices)) == [None]


def test_shares_fill_llama_cpps_array(path: Path) -> None:
    params, _kept = applied(path, tensor_split="3/1")
    assert list(params.tensor_split) == [3, 1, 0, 0]


def test_overrides_come_before_the_experts(path: Path) -> None:
    params, chosen = applied(path, "exps", override_tensor="ffn_up=CUDA1")
    first, second, last = (module._Override * 3).from_address(params.tensor_buft_overrides)
    assert (first.pattern, first.buffer_type) == (b"ffn_up", 112)
    assert (second.pattern, second.buffer_type) == (b"exps", 110)
    assert last.pattern is None
    assert chosen.moves_tensors


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "CUDA5"}, "no device CUDA5 for --device"),
        ({"override_tensor": "x=CUDA5"}, "no device CUDA5 for --override-tensor"),
        ({"split_mode": "row"}, "--split-mode row can't be used here"),
        ({"split_mode": "tensor", "tensor_split": "3/1"}, "--split-mode tensor can't split this model"),
    ],
)
def test_what_llama_cpp_would_die_of_is_a_usage_error(path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        applied(path, **settings)


def test_parts_of_tensors_are_counted_on_each_gpu(path: Path) -> None:
    _, chosen = applied(path, split_mode="tensor", tensor_split="1/1")
    buffers = (DeviceBuffer("Meta()", 100), DeviceBuffer("CPU", 7))
    assert chosen.by_device(buffers) == (DeviceBuffer("CUDA0", 100), DeviceBuffer("CUDA1", 100), DeviceBuffer("CPU", 7))


def test_weights_are_loaded_again_for_other_devices(path: Path) -> None:
    _, chosen = applied(path, device="CUDA1")
    assert chosen.are_of(EngineSettings(device="CUDA1", threads=3))
    assert not chosen.are_of(EngineSettings())

"""Contexts that can't be created: the cause, and the flags that help."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.gguf_writer import runnable_model, write

from llmrun import _native
from llmrun.engine.llama import parameters
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.llama.parameters import out_of_memory
from llmrun.errors import UsageError
from llmrun.protocol.devices import Gpu
from llmrun.protocol.loading import DeviceBuffer, Load


@pytest.mark.parametrize(("flag", "kinds"), [("k", ("q8_0", "f16")), ("v", ("f16", "q8_0"))])
def test_a_kv_type_whose_blocks_are_longer_than_a_head_is_a_usage_error(
    tmp_path: Path, flag: str, kinds: tuple[str, str]
) -> None:
    path = write(tmp_path / "tiny.gguf", runnable_model())  # heads of 16
    model = LlamaModel(str(path), 0, _native.CancelFlag())
    load = Load(str(path), 64, 64, kv_type_k=kinds[0], kv_type_v=kinds[1])
    try:
        with pytest.raises(UsageError, match=f"--cache-type-{flag} q8_0 does not suit this model") as caught:
            LlamaContext(model, load)
        assert caught.value.why == (
            f"it is stored in blocks of 32 elements, and the model's {'key' if flag == 'k' else 'value'} heads have 16"
        )
        LlamaContext(model, replace(load, kv_type_k="f16", kv_type_v="f16")).close()
    finally:
        model.close()


LOAD = Load("/model.gguf", 8192, 8192)


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

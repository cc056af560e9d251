"""Experts that stay with the processor: which tensors they are, and that the model computes the same."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hf_writer import files_of, write
from support.plain_logits import computed

from llmrun import _native
from llmrun.engine.llama.model import LlamaModel, experts_of
from llmrun.gguf.reader import read_header
from llmrun.lab.convert.job import convert_folder
from llmrun.protocol.loading import Load


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    convert_folder(write(folder / "Tiny-1B", files_of("Qwen3MoeForCausalLM")), folder / "tiny.gguf")
    return folder / "tiny.gguf"


def test_the_pattern_finds_the_experts_that_the_plan_counts(path: Path) -> None:
    header = read_header(path)
    pattern = experts_of((1,))
    found = [tensor for tensor in header.tensors if re.search(pattern, tensor.name)]
    assert len(found) == 3
    assert sum(tensor.n_bytes for tensor in found) == header.expert_bytes[1]


def test_layers_are_whole_numbers_not_beginnings_of_others() -> None:
    pattern = experts_of((1, 20))
    names = [f"blk.{layer}.ffn_down_exps.weight" for layer in range(60)]
    assert [name for name in names if re.search(pattern, name)] == [names[1], names[20]]


def test_the_model_computes_the_same(path: Path) -> None:
    whole = LlamaModel(str(path), 0, _native.CancelFlag())
    kept = LlamaModel(str(path), 0, _native.CancelFlag(), cpu_experts=(0, 1))
    try:
        tokens = [1, 5, 9, 2]
        assert np.array_equal(*(computed(model, tokens, model.vocabulary.n_tokens) for model in (whole, kept)))
    finally:
        kept.close()
        whole.close()


@pytest.mark.parametrize("change", [{"repack": False}, {"mmap": False}, {"cpu_experts": (0,)}, {"gpu_layers": 0}])
def test_weights_are_loaded_as_was_asked(path: Path, change: dict[str, Any]) -> None:
    plain = Load(str(path), 64)
    asked = replace(plain, **change)
    weights = LlamaModel.of(asked, _native.CancelFlag())
    assert (weights.is_for(asked), weights.is_for(plain)) == (True, False)
    weights.close()

"""LoRA adapters in llama.cpp: what they compute is what the merged model computes, wherever the KV cache moves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hf_writer import N_PIECES
from support.peft_writer import AdaptedModel, adapted_model
from support.plain_logits import computed, loaded

from llmrun.engine.llama.base import Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import BadModelError
from llmrun.protocol.adapters import Adapter, AdapterScale
from llmrun.protocol.loading import Load

IDS = [3, 70, 71, 260, 9, 42, 13, 5, 80, 81, 11, 100]
EXACT = {"kv_type_k": "f32", "kv_type_v": "f32", "flash_attention": "off"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    return adapted_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def model(files: AdaptedModel) -> Iterator[LlamaModel]:
    with loaded(files.base) as found:
        yield found


def adapter(path: Path, scale: float = 1.0) -> Adapter:
    return Adapter(path.stem, str(path), scale)


def test_the_logits_are_those_of_the_merged_model(files: AdaptedModel, model: LlamaModel) -> None:
    with loaded(files.merged) as other:
        wanted = computed(other, IDS, N_PIECES, **EXACT)
    found = computed(model, IDS, N_PIECES, adapters=(adapter(files.adapter),), **EXACT)
    assert np.abs(found - wanted).max() < 1e-3
    plain = computed(model, IDS, N_PIECES, **EXACT)
    assert np.abs(plain - wanted).max() > 0.1, "it makes a difference"


def test_scales_count_and_none_is_none(files: AdaptedModel, model: LlamaModel) -> None:
    other = files.adapter.with_name("other.gguf")
    shutil.copy(files.adapter, other)
    twice = computed(model, IDS, N_PIECES, adapters=(adapter(files.adapter), adapter(other)), **EXACT)
    double = computed(model, IDS, N_PIECES, adapters=(adapter(files.adapter, 2.0),), **EXACT)
    assert np.abs(twice - double).max() < 1e-3
    none = computed(model, IDS, N_PIECES, adapters=(adapter(files.adapter, 0.0),), **EXACT)
    assert np.array_equal(none, computed(model, IDS, N_PIECES, **EXACT))


def logits(context: LlamaContext, ids: list[int], start: int = 0) -> Any:
    last = len(ids) - 1
    context.decode([Entry(token, start + index, 0, index == last) for index, token in enumerate(ids)])
    array = np.ctypeslib.ctypes.c_float * N_PIECES
    return np.ctypeslib.as_array(array.from_address(context.logits(last))).copy()


def test_a_context_changes_its_adapters(files: AdaptedModel, model: LlamaModel) -> None:
    context = LlamaContext(model, Load("", 256, n_batch=64, adapters=(adapter(files.adapter),), **EXACT))  # type: ignore[arg-type]
    with_adapter = logits(context, IDS)
    for adapters in ((), (AdapterScale(0, 1.0),), (AdapterScale(0, 0.5),), (AdapterScale(0, 1.0),)):
        context.forget(0, 0)
        context.adapt(adapters)
        found = logits(context, IDS)
        assert (np.abs(found - with_adapter).max() < 1e-5) == (adapters == (AdapterScale(0, 1.0),))
    context.close()


def test_what_llama_cpp_refuses_is_said(files: AdaptedModel, model: LlamaModel) -> None:
    with pytest.raises(BadModelError, match=r"can't use the adapter base\.gguf"):
        LlamaContext(model, Load("", 256, n_batch=64, adapters=(adapter(files.base),)))

"""What a model keeps of its tokens, as llmrun/gguf/layers.py has it, against the states of llama.cpp's contexts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.architectures import LENGTHS, build, state_bytes
from support.tiny_models import tiny_headers

from llmrun.engine.llama.parameters import KV_TYPES
from llmrun.gguf.header import Header
from llmrun.gguf.layers import kv_layers, recurrent_bytes
from llmrun.gguf.reader import read_header
from llmrun.lab.quantize.types import TENSOR_TYPES
from llmrun.planning.memory import KV_BYTES

pytestmark = [pytest.mark.upstream, pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="it forks")]

MOST_OTHER_BYTES = 600  # of a state that are neither keys and values nor a recurrent layer's
HEADS_OF_A_BLOCK = {"embedding_length": 64, "rope.dimension_count": 32}  # heads are as long as a block of q8_0
MODELS = (
    "afmoe", "arwkv7", "bailingmoe3", "cohere2", "cohere2moe", "deepseek2", "exaone-moe", "exaone4", "gemma2",
    "gemma3", "gemma3n", "gemma4", "gpt-oss", "granite_swa", "jamba", "kimi-linear", "lfm2", "lfm2moe", "llama",
    "llama4", "mamba", "mamba2", "maple", "mellum", "mimo2", "minimax-01", "muse-glimmer", "olmo2", "plamo2",
    "plamo3", "rwkv6qwen2", "smallthinker", "spark2_5", "step35",
)  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Header, dict[str, Any]]]:
    return tiny_headers(tmp_path_factory.mktemp("models"), MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_keeps(told: dict[str, tuple[Header, dict[str, Any]]], name: str) -> None:
    header, answer = told[name]
    assert answer.keys() == {"window", "f16", "f32"}, answer
    assert header.sliding_window in (0, answer["window"])
    others = [half - (full - half) for half, full in zip(answer["f16"], answer["f32"], strict=True)]
    assert recurrent_bytes(header) <= others[0] < recurrent_bytes(header) + MOST_OTHER_BYTES
    layers = kv_layers(header)
    one_token = sum(layer.elements for layer in layers if layer.window)
    for length, half, full in zip(LENGTHS, answer["f16"], answer["f32"], strict=True):
        expected = sum(layer.elements * min(length, layer.window or length) for layer in layers)
        # The same cells in twice the bytes: what else a state holds cancels out.
        assert (full - half) / 2 == pytest.approx(expected, abs=one_token)


def test_types_of_the_cache(tmp_path: Path) -> None:
    """Each makes a cache, of the size of its blocks."""
    model = build(tmp_path / "llama.gguf", "llama", HEADS_OF_A_BLOCK)
    elements = sum(layer.elements for layer in kv_layers(read_header(tmp_path / "llama.gguf")))
    sizes = {number: (block, n_bytes) for number, block, n_bytes in TENSOR_TYPES.values()}
    grown = {kind: growth(model, number) for kind, number in KV_TYPES.items()}
    others = grown["f16"] - 2 * elements
    found = {kind: (n_bytes - others) / elements for kind, n_bytes in grown.items()}
    assert found == {kind: sizes[number][1] / sizes[number][0] for kind, number in KV_TYPES.items()}
    assert {kind: found[kind] for kind in KV_BYTES} == KV_BYTES


def growth(model: Any, kind: int) -> float:
    """Bytes of a state for each token."""
    before, after = state_bytes(model, kind)[-2:]
    return (after - before) / (LENGTHS[-1] - LENGTHS[-2])

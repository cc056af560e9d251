"""What a model keeps of its tokens, as llmrun/gguf/kv_layers.py has it, against the states of llama.cpp's contexts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.architectures import LENGTHS, WINDOW, Case, answers, build, state_bytes

from llmrun.engine.llama.context import KV_TYPES
from llmrun.gguf.header import Header
from llmrun.gguf.kv_layers import kv_layers, recurrent_bytes
from llmrun.gguf.reader import read_header
from llmrun.planning.memory import KV_BYTES
from llmrun.quantize.types import TENSOR_TYPES

pytestmark = [pytest.mark.upstream, pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="it forks")]

N_LAYERS = 4
MOST_OTHER_BYTES = 600  # of a state that are neither keys and values nor a recurrent layer's
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
HYBRID = {"attention.head_count_kv": [0, 1, 0, 1]}  # a layer without key heads is recurrent
LATENT = {
    "attention.head_count_kv": 1, "attention.kv_lora_rank": 32, "rope.dimension_count": 16, "attention.key_length": 48,
    "attention.value_length": 32, "attention.key_length_mla": 24, "attention.value_length_mla": 16,
}  # fmt: skip
HEADS_OF_A_BLOCK = {"embedding_length": 64, "rope.dimension_count": 32}  # heads are as long as a block of q8_0
# Architecture -> what its header has to say beside the usual.
MODELS: dict[str, dict[str, Any]] = {
    "afmoe": EXPERTS,
    "arwkv7": {"token_shift_count": 1},
    "bailingmoe3": {**EXPERTS, **LATENT, **HYBRID},
    "cohere2": {},
    "cohere2moe": EXPERTS,
    "deepseek2": {**EXPERTS, **LATENT},
    "exaone-moe": EXPERTS,
    "exaone4": {},
    "gemma2": {},
    "gemma3": {},
    "gemma3n": {},
    "gemma4": {"attention.key_length_swa": 16, "attention.value_length_swa": 16},
    "gpt-oss": EXPERTS,
    "granite_swa": {},
    "jamba": HYBRID,
    "kimi-linear": {**EXPERTS, **LATENT, **HYBRID},
    "lfm2": HYBRID,
    "lfm2moe": {**EXPERTS, **HYBRID},
    "llama": {},
    "llama4": EXPERTS,
    "mamba": {},
    "mamba2": {},
    "maple": EXPERTS,
    "mellum": EXPERTS,
    "mimo2": {},
    "minimax-01": {**EXPERTS, "block_count": 8},
    "muse-glimmer": {},
    "olmo2": {},
    "plamo2": {**HYBRID, "ssm.group_count": 0, "ssm.time_step_rank": 4},
    "plamo3": {},
    "rwkv6qwen2": {"token_shift_count": 1},
    "smallthinker": {**EXPERTS, "expert_gating_func": 2},
    "spark2_5": {},
    "step35": {},
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Header, dict[str, Any]]]:
    """Architecture -> the header of its model, and what llama.cpp says of it."""
    folder = tmp_path_factory.mktemp("models")
    usual = {"block_count": N_LAYERS, "attention.sliding_window": WINDOW}
    cases = {name: Case(name, {**usual, **settings}) for name, settings in MODELS.items()}
    return {name: (read_header(folder / f"{name}.gguf"), answer) for name, answer in answers(folder, cases).items()}


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

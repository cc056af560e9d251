"""Every architecture that support.architectures can make a tiny model of, with what its header has to say for that.

Each has four layers, and a window where there are windows. What is not here wants tensors or settings of its own that
llama.cpp's log does not name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from support.architectures import Case, answers

N_LAYERS, WINDOW = 4, 32
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
HYBRID = {"attention.head_count_kv": [0, 1, 0, 1]}  # a layer without key heads is recurrent
LATENT = {
    "attention.head_count_kv": 1, "attention.kv_lora_rank": 32, "rope.dimension_count": 16, "attention.key_length": 48,
    "attention.value_length": 32, "attention.key_length_mla": 24, "attention.value_length_mla": 16,
}  # fmt: skip
EVERY_HEAD = {"attention.head_count_kv": 2}  # has keys of its own
TOKEN_TYPES = {"tokenizer.ggml.token_type_count": 2}
_PLAIN = (
    "arcee", "baichuan", "bitnet", "bloom", "chameleon", "chatglm", "codeshell", "cogvlm", "cohere2", "command-r",
    "deci", "dream", "ernie4_5", "eurobert", "exaone", "exaone4", "falcon", "falcon-h1", "gemma",
    "gemma-embedding", "gemma2", "gemma3", "gemma3n", "glm4", "gptneox", "granite", "granite_swa", "granitemoe",
    "hunyuan-dense", "hunyuan_vl", "hy_v3", "internlm2", "jais", "jais2", "llada", "llama", "llama-embed",
    "maincoder", "mamba", "mamba2", "mimo2", "minicpm", "minicpm3", "mistral3", "modern-bert", "mpt",
    "muse-glimmer", "nanbeige", "nemotron", "neo-bert", "olmo", "olmo2", "openelm", "orion", "pangu-embedded",
    "phi2", "phi3", "plamo", "plamo3", "plm", "qwen", "qwen2", "qwen2vl", "qwen3", "qwen35", "qwen3tts", "qwen3vl",
    "refact", "seed_oss", "smollm3", "spark2_5", "stablelm", "starcoder2", "step35", "talkie", "xverse",
)  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN},
    "afmoe": EXPERTS,
    "arctic": EXPERTS,
    "arwkv7": {"token_shift_count": 1},
    "bailingmoe": EXPERTS,
    "bailingmoe2": EXPERTS,
    "bailingmoe3": {**EXPERTS, **LATENT, **HYBRID},
    "bert": TOKEN_TYPES,
    "cohere2moe": EXPERTS,
    "dbrx": EXPERTS,
    "deepseek": EXPERTS,
    "deepseek2": {**EXPERTS, **LATENT},
    "deepseek2-ocr": {**EXPERTS, **EVERY_HEAD},
    "deepseek32": {**EXPERTS, **LATENT, "attention.key_length_mla": 32},
    "dots1": {**EXPERTS, **EVERY_HEAD},
    "ernie4_5-moe": EXPERTS,
    "exaone-moe": EXPERTS,
    "gemma4": {"attention.key_length_swa": 16, "attention.value_length_swa": 16},
    "glm-dsa": {**EXPERTS, **LATENT, "attention.key_length_mla": 32},
    "glm4moe": EXPERTS,
    "gpt-oss": EXPERTS,
    "gpt2": {"context_length": 256},
    "granitehybrid": {**HYBRID, "ssm.inner_size": 64},
    "grok": EXPERTS,
    "grovemoe": EXPERTS,
    "hunyuan-moe": EXPERTS,
    "jamba": HYBRID,
    "jina-bert-v3": TOKEN_TYPES,
    "kimi-linear": {**EXPERTS, **LATENT, **HYBRID},
    "lfm2": HYBRID,
    "lfm2moe": {**EXPERTS, **HYBRID},
    "llada-moe": EXPERTS,
    "llama4": EXPERTS,
    "maple": EXPERTS,
    "mellum": EXPERTS,
    "minimax-01": {**EXPERTS, "block_count": 8},
    "minimax-m2": EXPERTS,
    "mistral4": {**EXPERTS, **LATENT, "attention.key_length_mla": 32},
    "nemotron_h": HYBRID,
    "nomic-bert": TOKEN_TYPES,
    "nomic-bert-moe": {**EXPERTS, **TOKEN_TYPES, "moe_every_n_layers": 2},
    "olmoe": {**EXPERTS, **EVERY_HEAD},
    "paddleocr": {"rope.dimension_sections": [4, 2, 2, 0]},
    "phimoe": EXPERTS,
    "plamo2": {**HYBRID, "ssm.group_count": 0, "ssm.time_step_rank": 4},
    "qwen2moe": EXPERTS,
    "qwen35moe": EXPERTS,
    "qwen3moe": EXPERTS,
    "qwen3next": EXPERTS,
    "qwen3vlmoe": EXPERTS,
    "rnd1": EXPERTS,
    "rwkv6qwen2": {"token_shift_count": 1},
    "smallthinker": {**EXPERTS, "expert_gating_func": 2},
    "starcoder": {"context_length": 256},
    "t5": EVERY_HEAD,
    "t5encoder": EVERY_HEAD,
}
"""Architecture -> what its header has to say beside the usual."""


def tiny_answers(folder: Path, names: Mapping[str, Any] | tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What llama.cpp makes of tiny models of these architectures, see answers(); their files are folder/NAME.gguf."""
    usual = {"block_count": N_LAYERS, "attention.sliding_window": WINDOW}
    return answers(folder, {name: Case(name, {**usual, **ARCHITECTURES[name]}) for name in names})


def tiny_headers(folder: Path, names: Mapping[str, Any] | tuple[str, ...]) -> dict[str, tuple[Header, dict[str, Any]]]:
    """Architecture -> the header of its tiny model, and what llama.cpp makes of it."""
    found = tiny_answers(folder, names)
    return {name: (read_header(folder / f"{name}.gguf"), answer) for name, answer in found.items()}

"""Tiny models with random weights whose memory can't be cut: recurrent layers, or a sliding window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from support.architectures import Case, answers
from support.gguf_copy import like
from support.tiny_models import ARCHITECTURES, N_LAYERS, WINDOW

HYBRIDS = ("lfm2", "qwen35", "qwen35moe", "granitehybrid", "nemotron_h", "jamba", "mamba2")
WINDOWED = ("gemma3", "gpt-oss")
# All experts for each token: of random ones, which two are the best is decided by roundings, and they differ with what
# else is in a batch.
ALL_EXPERTS = {"expert_used_count": 4}
CASES = {
    **{name: Case(name, ARCHITECTURES[name]) for name in (*HYBRIDS, *WINDOWED, "llama")},
    "gpt-oss": Case("gpt-oss", {**ARCHITECTURES["gpt-oss"], **ALL_EXPERTS}),
    # As many values as heads times their length.
    "qwen35": Case("qwen35", {"ssm.inner_size": 32}),
    "qwen35moe": Case("qwen35moe", {**ARCHITECTURES["qwen35moe"], **ALL_EXPERTS, "ssm.inner_size": 32}),
    # A recurrent layer, attention, a recurrent layer, a feed-forward layer.
    "nemotron_h": Case("nemotron_h", {"attention.head_count_kv": [0, 1, 0, 0], "feed_forward_length": [0, 0, 0, 64]}),
}
OPTIONAL = {
    "qwen35": {"attn_qkv.weight": (64, 32), "attn_gate.weight": (32, 32)},
    "granitehybrid": {"ssm_conv1d.bias": (96,)},
    "nemotron_h": {"ssm_conv1d.bias": (96,)},
}
OPTIONAL["qwen35moe"] = OPTIONAL["qwen35"]
"""Tensors of a recurrent layer that llama.cpp loads a model without, and dies of at its first batch."""


def write_models(folder: Path, names: tuple[str, ...], **settings: Any) -> dict[str, Path]:
    """Write models with random weights, and return their files.

    Args:
        settings: of all of them, more or others.
    """
    usual = {"block_count": N_LAYERS, "attention.sliding_window": WINDOW}
    answers(folder, {name: Case(name, {**usual, **CASES[name].settings, **settings}) for name in names})
    return {name: with_weights(folder / f"{name}.gguf", name) for name in names}


def with_weights(path: Path, architecture: str) -> Path:
    """A copy with random weights instead of zeros, under which a wrong state would change nothing."""
    generator = np.random.default_rng(1)
    shapes = {tensor.name: tensor.data.shape for tensor in GGUFReader(path).tensors}
    recurrent = {name.rpartition("ssm_")[0] for name in shapes if ".ssm_conv1d.weight" in name}
    for prefix in recurrent:
        shapes |= {f"{prefix}{name}": shape for name, shape in OPTIONAL.get(architecture, {}).items()}
    tensors = {name: generator.normal(0, 0.2, shape) for name, shape in shapes.items()}
    for name, values in tensors.items():
        if name.endswith("ssm_a"):
            tensors[name] = -np.abs(values) - 0.1  # a decay
        elif name.endswith("norm.weight"):
            tensors[name] = values + 1
    return like(path, path.with_suffix(".random.gguf"), architecture, {}, tensors)

"""RoPE settings: the base, and the scaling beyond the trained context.

Owns the mapping from transformers' settings to llama.cpp's metadata and factor tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmrun.convert.config import Config
from llmrun.errors import BadModelError, UsageError
from llmrun.gguf.rules import MAX_CONTEXT

# Name in transformers -> llama.cpp's key for YaRN.
_YARN = {
    "extrapolation_factor": "rope.scaling.yarn_ext_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_MINISTRAL = {
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "llama_4_scaling_beta": "attention.temperature_scale",
}


@dataclass
class Rope:
    """RoPE settings of the file."""

    metadata: dict[str, Any] = field(default_factory=dict)  # key without the architecture's name -> value
    factors: dict[str, list[float]] = field(default_factory=dict)  # tensor name -> one value per pair of elements
    notes: list[str] = field(default_factory=list)  # differences that the user should know


def read_rope(config: Config, architecture: str, head_length: int) -> Rope:
    """Return the RoPE settings in config.json.

    Args:
        architecture: llama.cpp's name.
        head_length: number of rotated elements of a head.

    Raises:
        UsageError: llama.cpp does not support the RoPE scaling for this architecture.
        BadModelError: a setting is missing or invalid.
    """
    scaling = _scaling(config)
    rope = Rope()
    base = scaling.number("rope_theta", 1e-6)
    if architecture != "gemma2" or base != 10_000.0:  # llama.cpp's default
        rope.metadata["rope.freq_base"] = base
    kind = (scaling.text("rope_type") or scaling.text("type") or "default").lower()
    if kind in ("default", "none", "mrope"):
        return rope
    if architecture == "phi3":
        _phi3(config, scaling, kind, head_length, rope)
    elif kind == "linear":
        rope.metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.number("factor", 1)}
    elif kind == "yarn" and architecture != "gemma2":
        _yarn(scaling, rope, _MINISTRAL if architecture == "mistral3" else {})
    elif kind == "llama3" and architecture == "llama":
        rope.factors["rope_freqs.weight"] = _llama3(scaling, base, head_length)
    elif kind == "dynamic":
        rope.notes.append("dynamic RoPE scaling is ignored: positions beyond the trained context are not scaled")
    else:
        raise UsageError(f"rope scaling {kind[:40]!r} of {architecture} models can't be converted")
    return rope


def _scaling(config: Config) -> Config:
    """Return the settings of full attention, from rope_parameters or the older rope_theta and rope_scaling."""
    found: Mapping[str, Any] = config.part("rope_parameters") or config.part("rope_scaling")
    full = found.get("full_attention")
    found = full if isinstance(full, dict) else found
    outer = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor", "max_position_embeddings")
    return Config(found, {name: config.get(name) for name in outer if config.has(name)})


def local_base(config: Config) -> float | None:
    """Return the base of layers with a sliding window; None if it is that of the other layers."""
    sliding = config.part("rope_parameters").get("sliding_attention")
    if isinstance(sliding, dict):
        return Config(sliding).number("rope_theta", 1e-6)
    return config.number("rope_local_base_freq", 1e-6) if config.has("rope_local_base_freq") else None


def _yarn(scaling: Config, rope: Rope, further: Mapping[str, str]) -> None:
    rope.metadata |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling.number("factor", 1),
        "rope.scaling.original_context_length": scaling.count("original_max_position_embeddings", MAX_CONTEXT),
    }
    for hf_name, gguf_name in {**_YARN, **further}.items():
        if scaling.has(hf_name):
            rope.metadata[gguf_name] = scaling.number(hf_name)
    for hf_name in ("attention_factor", "attn_factor"):
        if scaling.has(hf_name):
            rope.metadata["rope.scaling.yarn_attn_factor"] = scaling.number(hf_name)
            return


def _llama3(scaling: Config, base: float, head_length: int) -> list[float]:
    """Return the divisor of each frequency: the factor for low ones, 1 for high ones, interpolated between.

    From transformers' modeling_rope_utils.py, in float32 like the original.
    """
    import numpy as np

    factor = scaling.number("factor", 1)
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    context = scaling.count("original_max_position_embeddings", MAX_CONTEXT)
    if not 0 < low < high:
        scaling.fail("low_freq_factor", "more than 0 and less than high_freq_factor")
    steps = np.arange(0, head_length, 2, dtype=np.float32) / np.float32(head_length)
    lengths = 2 * math.pi / (1.0 / np.power(np.float32(base), steps))
    smooth = (context / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    found = np.where(lengths < context / high, 1.0, np.where(lengths > context / low, factor, between))
    return [float(value) for value in found]


def _phi3(config: Config, scaling: Config, kind: str, head_length: int, rope: Rope) -> None:
    """Add LongRoPE: factors for short and for long contexts, and the attention factor."""
    if kind not in ("longrope", "su", "yarn"):
        raise UsageError(f"rope scaling {kind[:40]!r} of phi3 models can't be converted")
    original = scaling.count("original_max_position_embeddings", MAX_CONTEXT)
    scale = config.count("max_position_embeddings", MAX_CONTEXT) / original
    if original < 2:
        scaling.fail("original_max_position_embeddings", "2 or more")
    growth = math.log(scale) if scale > 1 else 0.0
    factor = 0.1 * growth + 1 if kind == "yarn" else math.sqrt(1 + growth / math.log(original))
    rope.metadata["rope.scaling.attn_factor"] = factor
    for hf_name in ("long_factor", "short_factor"):
        values = scaling.get(hf_name)
        if not isinstance(values, list) or len(values) != head_length // 2:
            raise BadModelError(f"{hf_name} must have {head_length // 2} numbers", why="config.json says otherwise")
        numbers = [Config({hf_name: value}).number(hf_name) for value in values]
        rope.factors[f"rope_factors_{hf_name.partition('_')[0]}.weight"] = numbers

"""The hyperparameters in config.json as the metadata that llama.cpp reads, with RoPE and its scaling.

Settings that llama.cpp would compute differently are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmrun.errors import BadModelError, UsageError
from llmrun.gguf.layers import MAX_LAYERS
from llmrun.gguf.rules import MAX_CONTEXT, MAX_VOCABULARY
from llmrun.lab.convert.architectures import Family
from llmrun.lab.convert.checkpoint import Floats, TensorSource
from llmrun.lab.convert.folder import Config, Folder
from llmrun.lab.convert.sentence_transformers import pooling_type, prompt_notes, read_modules, refuse_others

MAX_WIDTH = 1 << 20
MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
_GRANITE_SCALES = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of the numbers in config.json; the defaults are for a config.json without tensors.

    A number is checked before anything is allocated or repeated by it, so a hostile one costs neither memory nor time.
    """

    n_layers: int = MAX_LAYERS  # each has at least one tensor
    n_experts: int = MAX_EXPERTS  # of a layer
    width: int = MAX_WIDTH  # of vectors and heads; also the number of heads
    n_tokens: int = MAX_VOCABULARY  # rows of the embeddings


def bounds_of(sources: Mapping[str, TensorSource], n_tokens: int) -> Bounds:
    """Return the bounds set by the number of tensors and by the longest dimension of a tensor that is not empty."""
    longest = max((max(source.shape) for source in sources.values() if all(source.shape)), default=1)
    return Bounds(min(MAX_LAYERS, len(sources)), min(MAX_EXPERTS, max(len(sources), longest)), longest, n_tokens)


@dataclass
class Shape:
    """Hyperparameters and tensor shapes."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_experts: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)  # key without the architecture's name -> value
    # GGUF name of a tensor without its layer -> required shape in PyTorch's order
    dimensions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    factors: dict[str, Floats] = field(default_factory=dict)  # tensors computed from the settings: name -> values
    notes: list[str] = field(default_factory=list)  # differences that the user should know


def read_shape(config: Config, family: Family, folder: Folder, bounds: Bounds) -> Shape:
    """Return the shape that config.json describes.

    Raises:
        BadModelError: a setting is missing or invalid.
        UsageError: the model has a feature that llama.cpp does not compute for this architecture.
    """
    _check_activation(config, family)
    width = config.count("hidden_size", bounds.width)
    heads = config.count("num_attention_heads", bounds.width)
    kv_heads = config.count("num_key_value_heads", heads) if config.has("num_key_value_heads") else heads
    shape = Shape(config.count("num_hidden_layers", bounds.n_layers), heads, kv_heads)
    _pooling(shape, folder)
    if heads % kv_heads:
        config.fail("num_key_value_heads", f"a divisor of the {heads} heads")
    shape.metadata |= {
        "block_count": shape.n_layers,
        "context_length": config.count("max_position_embeddings", MAX_CONTEXT),
        "embedding_length": width,
        "feed_forward_length": config.count("intermediate_size", MAX_WIDTH),
        "attention.head_count": heads,
    }
    if not config.has("head_dim") and width % heads:
        config.fail("hidden_size", f"a multiple of the {heads} heads")
    head_length = config.count("head_dim", bounds.width) if config.has("head_dim") else width // heads
    if family.name == "bert":
        _bert(config, shape)
        _set_dimensions(family, shape, head_length)
        shape.dimensions["token_types"] = (config.count("type_vocab_size", bounds.n_tokens), width)
        return shape
    shape.metadata |= {
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", 0, 1),
    }
    if family.name.startswith("granite"):
        if head_length * heads != width:
            config.fail("head_dim", f"{width // heads}, the value that llama.cpp assumes")
    elif config.has("head_dim") or (family.name == "llama" and not family.experts):
        shape.metadata |= {"attention.key_length": head_length, "attention.value_length": head_length}
    rotated = _rotated(config, family, shape, head_length)
    _rope(config, family.name, rotated, shape)
    if family.experts or family.halves:
        _experts(config, family, shape, bounds)
    _own_settings(config, family, shape, bounds)
    _set_dimensions(family, shape, head_length)
    return shape


def _set_dimensions(family: Family, shape: Shape, head_length: int) -> None:
    width, inner = shape.metadata["embedding_length"], shape.metadata["feed_forward_length"]
    queries, keys, experts = shape.n_heads * head_length, shape.n_kv_heads * head_length, shape.n_experts
    routed = shape.metadata.get("expert_feed_forward_length", inner)
    all_heads = family.name == "olmo2"  # its norms of queries and keys are over all heads at once
    norms = {name for name in (*family.outer.values(), *family.layer.values()) if name.endswith("_norm")}
    shape.dimensions = dict.fromkeys(norms, (width,)) | {
        "position_embd": (shape.metadata["context_length"], width),
        "attn_q_norm": (queries if all_heads else head_length,),
        "attn_k_norm": (keys if all_heads else head_length,),
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_qkv": (queries + 2 * keys, width),
        "attn_output": (width, queries),
        "ffn_gate": (inner, width),
        "ffn_up": (2 * inner if family.name == "phi3" else inner, width),
        "ffn_down": (width, inner),
        "ffn_gate_inp": (experts, width),
        "ffn_gate_exps": (experts, routed, width),
        "ffn_up_exps": (experts, routed, width),
        "ffn_down_exps": (experts, width, routed),
    }


def _check_activation(config: Config, family: Family) -> None:
    names = ("hidden_activation", "hidden_act") if family.name.startswith("gemma") else ("hidden_act",)
    stated = next((config.text(name) for name in names if config.get(name) is not None), family.activation)
    if stated != family.activation:
        raise UsageError(
            f"the activation function {stated[:40]!r} can't be converted",
            why=f"llama.cpp computes {family.activation} in {family.name} models",
        )


def _rotated(config: Config, family: Family, shape: Shape, head_length: int) -> int:
    """Return the number of rotated elements of a head; add it to the metadata where llama.cpp requires it."""
    parameters = {**config.part("rope_scaling"), **config.part("rope_parameters")}
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = 1.0 if share is None else Config({"partial_rotary_factor": share}).number("partial_rotary_factor", 0, 1)
    if family.name == "phi3":
        rotated = int(share * shape.metadata["embedding_length"]) // shape.n_heads
        if not 0 < rotated <= head_length or rotated % 2:
            config.fail("partial_rotary_factor", "a share of a head that is an even number of elements")
        shape.metadata["rope.dimension_count"] = rotated
        return rotated
    if share != 1.0:
        raise UsageError(
            f"partial rotation of heads ({share}) can't be converted",
            why=f"llama.cpp rotates whole heads in {family.name} models",
        )
    if family.permutes:
        shape.metadata["rope.dimension_count"] = head_length
    return head_length


def _own_settings(config: Config, family: Family, shape: Shape, bounds: Bounds) -> None:
    """Add the metadata that only one architecture has."""
    name = family.name
    if family.permutes:
        shape.metadata["vocab_size"] = config.count("vocab_size", bounds.n_tokens)
    if name == "smollm3":
        _check_no_rope_layers(config, shape)
    if name in ("llama", "mistral3") and config.get("sliding_window"):
        _note_window(config, shape)
    if name.startswith("granite"):
        shape.metadata |= {gguf_name: config.number(hf_name) for hf_name, gguf_name in _GRANITE_SCALES.items()}
    if name in ("qwen2", "qwen3", "qwen3moe") and config.flag("use_sliding_window"):
        _note_window(config, shape)
    if name in ("gemma2", "gemma3"):
        _gemma(config, family, shape)
    if name == "phi3":
        shape.metadata |= {
            "rope.scaling.original_context_length": _phi3_context(config),
            "attention.sliding_window": config.count("sliding_window", MAX_CONTEXT)
            if config.get("sliding_window")
            else 0,
        }


def _experts(config: Config, family: Family, shape: Shape, bounds: Bounds) -> None:
    count = "num_experts" if family.name == "qwen3moe" else "num_local_experts"
    shape.n_experts = config.count(count, bounds.n_experts)
    used = config.count("num_experts_per_tok", MAX_EXPERTS)
    if used > shape.n_experts:
        config.fail("num_experts_per_tok", f"at most {count}, {shape.n_experts}")
    shape.metadata |= {"expert_count": shape.n_experts, "expert_used_count": used}
    if family.name == "qwen3moe":
        shape.metadata["expert_feed_forward_length"] = config.count("moe_intermediate_size", MAX_WIDTH)
        if config.get("decoder_sparse_step") != 1 or config.get("mlp_only_layers"):
            raise UsageError("a qwen3moe model with dense layers can't be converted", why="llama.cpp expects none")
        if config.get("norm_topk_prob") is not True:
            raise UsageError(
                "a qwen3moe model without normalized expert weights can't be converted",
                why="llama.cpp assumes norm_topk_prob: true, which config.json does not state",
            )


def _phi3_context(config: Config) -> int:
    """Return the context before RoPE scaling; the newer form of config.json has it in rope_parameters."""
    inner = {**config.part("rope_scaling"), **config.part("rope_parameters")}
    name = "original_max_position_embeddings"
    return Config({name: inner.get(name, config.get(name))}).count(name, MAX_CONTEXT)


def _note_window(config: Config, shape: Shape) -> None:
    window = config.count("sliding_window", MAX_CONTEXT)
    if window < shape.metadata["context_length"]:
        shape.notes.append(f"the sliding window of {window:,} tokens is ignored: llama.cpp attends to all tokens")


def _check_no_rope_layers(config: Config, shape: Shape) -> None:
    """Refuse settings other than no RoPE in every fourth layer, which is fixed in llama.cpp."""
    stated = config.get("no_rope_layers")
    interval = config.get("no_rope_layer_interval")
    expected = [int((number + 1) % 4 != 0) for number in range(shape.n_layers)]
    if (stated is not None and stated != expected) or (stated is None and interval not in (None, 4)):
        raise UsageError("no_rope_layers can't be converted", why="llama.cpp always skips RoPE in every 4th layer")


def _gemma(config: Config, family: Family, shape: Shape) -> None:
    layers_of_27b, period = (46, 2) if family.name == "gemma2" else (62, 6)
    head_length = config.count("head_dim", MAX_WIDTH)
    divisor = config.number("query_pre_attn_scalar")
    used = shape.metadata["embedding_length"] // shape.n_heads if shape.n_layers == layers_of_27b else head_length
    if divisor != used:
        raise UsageError(
            f"query_pre_attn_scalar {divisor:g} can't be converted", why=f"llama.cpp uses {used} for this model"
        )
    if config.flag("use_bidirectional_attention"):
        raise UsageError("a gemma model with bidirectional attention can't be converted")
    if family.name == "gemma2":
        shape.metadata["attn_logit_softcapping"] = config.number("attn_logit_softcapping")
        shape.metadata["final_logit_softcapping"] = config.number("final_logit_softcapping")
    elif config.get("attn_logit_softcapping") is not None:
        raise UsageError("attn_logit_softcapping of gemma3 models can't be converted")
    elif config.get("final_logit_softcapping"):
        shape.metadata["final_logit_softcapping"] = config.number("final_logit_softcapping")
    if family.name == "gemma3" and config.get("sliding_window_pattern") == 1:
        return
    _check_layer_types(config, period, shape.n_layers)
    shape.metadata["attention.sliding_window"] = config.count("sliding_window", MAX_CONTEXT)
    base = local_base(config) if family.name == "gemma3" else None
    if base is not None:
        shape.metadata["rope.freq_base_swa"] = base


def _check_layer_types(config: Config, period: int, n_layers: int) -> None:
    """Refuse settings other than full attention in every period-th layer, the order fixed in llama.cpp."""
    expected = ["sliding_attention" if (number + 1) % period else "full_attention" for number in range(n_layers)]
    stated = config.get("layer_types")
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if (stated is not None and stated != expected) or (stated is None and pattern not in (None, period)):
        raise UsageError(
            "layer_types of this model can't be converted",
            why=f"llama.cpp assumes full attention in every {period}th layer",
        )


# ---- embeddings


def _bert(config: Config, shape: Shape) -> None:
    if config.get("position_embedding_type") != "absolute" or config.flag("is_decoder"):
        raise UsageError("BERT models with relative positions, and decoders, can't be converted")
    shape.metadata |= {"attention.layer_norm_epsilon": config.number("layer_norm_eps", 0, 1), "attention.causal": False}


def _pooling(shape: Shape, folder: Folder) -> None:
    """Read the modules of sentence-transformers: the way the vectors of all tokens become one."""
    modules = read_modules(folder)
    refuse_others(modules)
    pooling, notes = pooling_type(folder, modules)
    if pooling is not None:
        shape.metadata["pooling_type"] = pooling
        shape.notes += [*notes, *prompt_notes(folder)]


# ---- RoPE: the base, and the scaling beyond the trained context

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


def _rope(config: Config, architecture: str, head_length: int, shape: Shape) -> None:
    """Add the RoPE settings; refuse a scaling that llama.cpp does not have for this architecture.

    Args:
        head_length: number of rotated elements of a head.
    """
    scaling = _scaling(config)
    base = scaling.number("rope_theta", 1e-6)
    if architecture != "gemma2" or base != 10_000.0:  # llama.cpp's default
        shape.metadata["rope.freq_base"] = base
    kind = (scaling.text("rope_type") or scaling.text("type") or "default").lower()
    if kind in ("default", "none", "mrope"):
        return
    if architecture == "phi3":
        _phi3(config, scaling, kind, head_length, shape)
    elif kind == "linear":
        shape.metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.number("factor", 1)}
    elif kind == "yarn" and architecture != "gemma2":
        _yarn(scaling, shape, _MINISTRAL if architecture == "mistral3" else {})
    elif kind == "llama3" and architecture == "llama":
        shape.factors["rope_freqs.weight"] = _llama3(scaling, base, head_length)
    elif kind == "dynamic":
        shape.notes.append("dynamic RoPE scaling is ignored: positions beyond the trained context are not scaled")
    else:
        raise UsageError(f"rope scaling {kind[:40]!r} of {architecture} models can't be converted")


def _scaling(config: Config) -> Config:
    """Return the settings of full attention, from rope_parameters or the older rope_theta and rope_scaling."""
    settings: Mapping[str, Any] = config.part("rope_parameters") or config.part("rope_scaling")
    full = settings.get("full_attention")
    settings = full if isinstance(full, dict) else settings
    outer = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor", "max_position_embeddings")
    return Config(settings, {name: config.get(name) for name in outer if config.has(name)})


def local_base(config: Config) -> float | None:
    """Return the base of layers with a sliding window; None if it is that of the other layers."""
    sliding = config.part("rope_parameters").get("sliding_attention")
    if isinstance(sliding, dict):
        return Config(sliding).number("rope_theta", 1e-6)
    return config.number("rope_local_base_freq", 1e-6) if config.has("rope_local_base_freq") else None


def _yarn(scaling: Config, shape: Shape, further: Mapping[str, str]) -> None:
    shape.metadata |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling.number("factor", 1),
        "rope.scaling.original_context_length": scaling.count("original_max_position_embeddings", MAX_CONTEXT),
    }
    for hf_name, gguf_name in {**_YARN, **further}.items():
        if scaling.has(hf_name):
            shape.metadata[gguf_name] = scaling.number(hf_name)
    for hf_name in ("attention_factor", "attn_factor"):
        if scaling.has(hf_name):
            shape.metadata["rope.scaling.yarn_attn_factor"] = scaling.number(hf_name)
            return


def _llama3(scaling: Config, base: float, head_length: int) -> Floats:
    """Return the divisor of each frequency: the factor for low ones, 1 for high ones, interpolated between.

    From transformers' modeling_rope_utils.py, in float32 like the original.
    """
    factor = scaling.number("factor", 1)
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    context = scaling.count("original_max_position_embeddings", MAX_CONTEXT)
    if not 0 < low < high:
        scaling.fail("low_freq_factor", "more than 0 and less than high_freq_factor")
    steps = np.arange(0, head_length, 2, dtype=np.float32) / np.float32(head_length)
    lengths = 2 * math.pi / (1.0 / np.power(np.float32(base), steps))
    smooth = (context / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(lengths < context / high, 1.0, np.where(lengths > context / low, factor, between))
    return divisors.astype(np.float32)


def _phi3(config: Config, scaling: Config, kind: str, head_length: int, shape: Shape) -> None:
    """Add LongRoPE: factors for short and for long contexts, and the attention factor."""
    if kind not in ("longrope", "su", "yarn"):
        raise UsageError(f"rope scaling {kind[:40]!r} of phi3 models can't be converted")
    original = scaling.count("original_max_position_embeddings", MAX_CONTEXT)
    scale = config.count("max_position_embeddings", MAX_CONTEXT) / original
    if original < 2:
        scaling.fail("original_max_position_embeddings", "2 or more")
    growth = math.log(scale) if scale > 1 else 0.0
    factor = 0.1 * growth + 1 if kind == "yarn" else math.sqrt(1 + growth / math.log(original))
    shape.metadata["rope.scaling.attn_factor"] = factor
    for hf_name in ("long_factor", "short_factor"):
        values = scaling.get(hf_name)
        if not isinstance(values, list) or len(values) != head_length // 2:
            raise BadModelError(f"{hf_name} must have {head_length // 2} numbers", why="config.json says otherwise")
        numbers = [Config({hf_name: value}).number(hf_name) for value in values]
        shape.factors[f"rope_factors_{hf_name.partition('_')[0]}.weight"] = np.array(numbers, dtype=np.float32)

"""The hyperparameters in config.json, as the metadata that llama.cpp reads.

Owns the keys of each architecture, and refuses settings that llama.cpp would compute differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmrun.convert.architectures import Family
from llmrun.convert.config import Config
from llmrun.convert.folder import Folder
from llmrun.convert.rope import local_base, read_rope
from llmrun.convert.sources import TensorSource
from llmrun.errors import BadModelError, UsageError
from llmrun.gguf.kv_layers import MAX_LAYERS
from llmrun.gguf.rules import MAX_CONTEXT, MAX_EXPERTS, MAX_VOCABULARY
from llmrun.protocol.codec import load_json

MAX_WIDTH = 1 << 20
_POOLING = {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2, "pooling_mode_lasttoken": 3}
_POOLING_NAMES = {"mean": 1, "cls": 2, "lasttoken": 3}
_MAX_MODULES = 100
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
    factors: dict[str, list[float]] = field(default_factory=dict)  # tensors computed from the settings: name -> values
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
        _bert(config, shape, folder)
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
    rope = read_rope(config, family.name, rotated)
    shape.metadata |= rope.metadata
    shape.factors, shape.notes = rope.factors, rope.notes
    if family.experts or family.halves:
        _experts(config, family, shape, bounds)
    _own_settings(config, family, shape, folder, bounds)
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


def _own_settings(config: Config, family: Family, shape: Shape, folder: Folder, bounds: Bounds) -> None:
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
    if name in ("qwen2", "qwen3", "qwen3moe"):
        if config.flag("use_sliding_window"):
            _note_window(config, shape)
        _pooling(shape, folder)
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


def _bert(config: Config, shape: Shape, folder: Folder) -> None:
    if config.get("position_embedding_type") != "absolute" or config.flag("is_decoder"):
        raise UsageError("BERT models with relative positions, and decoders, can't be converted")
    shape.metadata |= {"attention.layer_norm_epsilon": config.number("layer_norm_eps", 0, 1), "attention.causal": False}
    _pooling(shape, folder)


def _pooling(shape: Shape, folder: Folder) -> None:
    """Read the pooling of sentence-transformers: the way the vectors of all tokens become one."""
    for path in _pooling_folders(folder):
        settings = folder.json(f"{path}/config.json")
        found = next((number for name, number in _POOLING.items() if settings.get(name) is True), None)
        found = found or _POOLING_NAMES.get(str(settings.get("pooling_mode")))
        if found is None:
            raise UsageError("the model's pooling can't be converted", why="only mean, first and last token can")
        shape.metadata["pooling_type"] = found
        return


def _pooling_folders(folder: Folder) -> list[str]:
    if not folder.has("modules.json"):
        return []
    try:
        modules = load_json(folder.text("modules.json"))
    except ValueError as error:
        raise BadModelError("modules.json is damaged", why=str(error), hint="download it again") from None
    rows = [row for row in modules[:_MAX_MODULES] if isinstance(row, dict)] if isinstance(modules, list) else []
    paths = [row.get("path") for row in rows if str(row.get("type", "")).endswith("Pooling")]
    # Only a direct subfolder is allowed.
    return [path for path in paths if isinstance(path, str) and path.replace("_", "").isalnum()]

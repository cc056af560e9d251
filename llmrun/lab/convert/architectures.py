"""Architectures that can be converted, and the names of their tensors in checkpoints and in GGUF files.

The GGUF names are those of llama.cpp's own converter. Every tensor of a table must be in the model, and every tensor of
the model in a table: none is dropped silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmrun.errors import BadModelError, UsageError
from llmrun.lab.convert.folder import Config, Json

ANOTHER_WAY = "llama.cpp's own converter may know it: add --with PATH/convert_hf_to_gguf.py"
"""The hint for a model that is refused."""


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures that are converted the same way."""

    name: str  # llama.cpp's name of the architecture
    outer: Mapping[str, str]  # tensors outside the layers: checkpoint name without prefix and ".weight" -> GGUF name
    layer: Mapping[str, str]  # the tensors of each layer, without the layer's number
    # settings that config.json may omit, from transformers' configuration classes
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: str = "silu"  # the only activation function that llama.cpp computes for it
    permutes: bool = False  # query and key rows are reordered, see sources.permute_heads()
    norm_shift: float = 0.0  # constant added to the weights of norms
    tied: bool = False  # the embeddings always are the output matrix too
    # per layer: checkpoint name of one expert's matrix, with {} for its number -> GGUF name of all experts'
    experts: Mapping[str, str] = field(default_factory=dict)
    # per layer: checkpoint name of all experts' gate and up matrices in one tensor -> the two GGUF names
    halves: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    layers_prefix: str = "layers"


_OUTER = {"embed_tokens": "token_embd", "norm": "output_norm"}
_PROJECTIONS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_ATTENTION = {"input_layernorm": "attn_norm", **_PROJECTIONS}
_GATED = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_LLAMA = {**_ATTENTION, "post_attention_layernorm": "ffn_norm", **_GATED}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_ROUTED = {**_ATTENTION, "post_attention_layernorm": "ffn_norm"}
_MIXTRAL = {**_ROUTED, "block_sparse_moe.gate": "ffn_gate_inp"}
_QWEN3_MOE = {**_ROUTED, **_HEAD_NORMS, "mlp.gate": "ffn_gate_inp"}
_GRANITE_MOE = {
    **_ROUTED,
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}
_EXPERTS = ("ffn_gate_exps", "ffn_down_exps", "ffn_up_exps")
_OLMO2 = {
    **_PROJECTIONS,
    **_HEAD_NORMS,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **_GATED,
}
_GEMMA = {
    **_ATTENTION,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **_GATED,
}
_PHI = {
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_BERT_OUTER = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
_BERT = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_LLAMA_DEFAULTS = {
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 2048, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
_GEMMA2_DEFAULTS = {
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 8192, "head_dim": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA3_DEFAULTS = {
    "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "head_dim": 256,
    "max_position_embeddings": 131_072, "num_attention_heads": 8, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_BERT_DEFAULTS = {
    "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_act": "gelu",
    "position_embedding_type": "absolute",
}  # fmt: skip

_GRANITE_DEFAULTS = {
    **_LLAMA_DEFAULTS, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}  # fmt: skip
_MISTRAL3_DEFAULTS = {**_LLAMA_DEFAULTS, "max_position_embeddings": 131_072, "num_key_value_heads": 8}

_LLAMAS = Family("llama", _OUTER, _LLAMA, _LLAMA_DEFAULTS, permutes=True)
_GEMMA3 = Family(
    "gemma3", _OUTER, {**_GEMMA, **_HEAD_NORMS}, _GEMMA3_DEFAULTS, "gelu_pytorch_tanh", norm_shift=1.0, tied=True
)
_MISTRAL3 = Family("mistral3", _OUTER, _LLAMA, _MISTRAL3_DEFAULTS, permutes=True)
_BERTS = Family("bert", _BERT_OUTER, _BERT, _BERT_DEFAULTS, "gelu", tied=True, layers_prefix="encoder.layer")

# The architecture named in config.json -> its family.
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": _LLAMAS,
    "MistralForCausalLM": _LLAMAS,
    "MixtralForCausalLM": Family(
        "llama",
        _OUTER,
        _MIXTRAL,
        {**_LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_position_embeddings": 131_072,
         "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        permutes=True,
        experts={f"block_sparse_moe.experts.{{}}.w{n}": gguf_name for n, gguf_name in enumerate(_EXPERTS, 1)},
    ),
    "Mistral3ForConditionalGeneration": _MISTRAL3,
    "Ministral3ForCausalLM": _MISTRAL3,
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        _OUTER,
        _LLAMA,
        {**_LLAMA_DEFAULTS, "rope_theta": 2_000_000.0, "max_position_embeddings": 32_768, "tie_word_embeddings": True},
        permutes=True,
    ),
    "Qwen2ForCausalLM": Family("qwen2", _OUTER, _LLAMA, {**_LLAMA_DEFAULTS, "max_position_embeddings": 32_768}),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        _OUTER,
        {**_LLAMA, **_HEAD_NORMS},
        {**_LLAMA_DEFAULTS, "max_position_embeddings": 32_768, "head_dim": 128},
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3moe",
        _OUTER,
        _QWEN3_MOE,
        {**_LLAMA_DEFAULTS, "max_position_embeddings": 32_768, "num_key_value_heads": 4, "num_experts": 128,
         "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": []},
        experts={f"mlp.experts.{{}}.{hf_name}_proj": f"ffn_{hf_name}_exps" for hf_name in ("down", "gate", "up")},
    ),
    "GraniteForCausalLM": Family("granite", _OUTER, _LLAMA, _GRANITE_DEFAULTS, permutes=True),
    "GraniteMoeForCausalLM": Family(
        "granitemoe",
        _OUTER,
        _GRANITE_MOE,
        {**_GRANITE_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2},
        permutes=True,
        halves={"block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps")},
    ),
    "Olmo2ForCausalLM": Family("olmo2", _OUTER, _OLMO2, {**_LLAMA_DEFAULTS, "rms_norm_eps": 1e-5}),
    "Gemma2ForCausalLM": Family(
        "gemma2", _OUTER, _GEMMA, _GEMMA2_DEFAULTS, "gelu_pytorch_tanh", norm_shift=1.0, tied=True
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": Family(
        "phi3",
        _OUTER,
        _PHI,
        {**_LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
         "original_max_position_embeddings": 4096},
    ),
    "BertModel": _BERTS,
    "BertForMaskedLM": _BERTS,
}  # fmt: skip

# Parts that llama.cpp does not use: buffers and training heads.
_UNUSED_ENDS = (".rotary_emb.inv_freq", ".attention.masked_bias", ".position_ids")
_UNUSED_STARTS = {"bert": ("pooler.", "cls.predictions.", "cls.seq_relationship.")}
_VISION = ("vision_tower.", "multi_modal_projector.", "vision_model.")


def find_family(config: Json) -> tuple[str, Family]:
    """Return the architecture named in config.json, and its family.

    Raises:
        BadModelError: config.json names none.
        UsageError: the architecture is not supported.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise BadModelError("config.json names no architecture", why="'architectures' is missing or empty")
    name = names[0]
    family = FAMILIES.get(name)
    if family is None:
        raise UsageError(
            f"models of the architecture {name[:80]} can't be converted",
            why=f"only {', '.join(FAMILIES)} can",
            hint=ANOTHER_WAY,
        )
    return name, family


def text_config(config: Json, family: Family) -> Config:
    """Return the settings of the text part, which vision models keep in an object of its own."""
    part = config.get("text_config")
    merged = {**config, **part} if isinstance(part, dict) else config
    return Config(merged, family.defaults)


def bare_name(name: str, family: Family) -> str | None:
    """Return a tensor's name without the prefixes that differ between classes; None if the tensor is unused."""
    bare = _without_prefix(name, family)
    # Checkpoints of the first years: https://github.com/huggingface/transformers/pull/1129
    bare = _with_new_end(bare) if family.name == "bert" else bare
    if bare.endswith(_UNUSED_ENDS) or bare.startswith((*_UNUSED_STARTS.get(family.name, ()), *_VISION)):
        return None
    return bare


def is_vision(name: str, family: Family) -> bool:
    return _without_prefix(name, family).startswith(_VISION)


def _without_prefix(name: str, family: Family) -> str:
    bare = name.replace("language_model.", "", 1)
    return bare.removeprefix("bert.") if family.name == "bert" else bare.removeprefix("model.")


def _with_new_end(name: str) -> str:
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def required_tensors(family: Family, n_layers: int) -> dict[str, str]:
    """Return bare name without ".weight" -> GGUF name of every tensor of a model, in the file's order."""
    required = dict(family.outer)
    for number in range(n_layers):
        for hf_name, gguf_name in family.layer.items():
            required[f"{family.layers_prefix}.{number}.{hf_name}"] = f"blk.{number}.{gguf_name}"
    return required


def expert_tensors(family: Family, n_layers: int, n_experts: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the GGUF name of each tensor that stacks experts' matrices, and the bare names of these matrices."""
    for number in range(n_layers):
        for hf_name, gguf_name in family.experts.items():
            prefix = f"{family.layers_prefix}.{number}.{hf_name}.weight"
            yield f"blk.{number}.{gguf_name}.weight", [prefix.format(expert) for expert in range(n_experts)]


def half_tensors(family: Family, n_layers: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the bare name of each tensor that is split into halves, and the GGUF names of the halves."""
    for number in range(n_layers):
        for hf_name, two in family.halves.items():
            yield (
                f"{family.layers_prefix}.{number}.{hf_name}.weight",
                [f"blk.{number}.{gguf_name}.weight" for gguf_name in two],
            )

"""Headers that llama.cpp can't bear, each with a word of the refusal."""

from __future__ import annotations

from typing import Any

from support.gguf_writer import metadata


def experts(**counts: int) -> dict[str, int]:
    return {f"llama.expert_{name}": number for name, number in counts.items()}


def other(architecture: str, **settings: Any) -> dict[str, Any]:
    """The same model under another architecture; a double underscore in a name stands for a dot."""
    own = {key.partition(".")[2]: value for key, value in metadata().items() if key.startswith("llama.")}
    own |= {name.replace("__", "."): value for name, value in settings.items()}
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in own.items()}}


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no architecture": ({"general.architecture": None}, "general.architecture is missing"),
    "projector": ({"general.architecture": "clip"}, "image or audio part"),
    "adapter": ({"general.type": "adapter"}, "general.type is 'adapter'"),
    "no layers": ({"llama.block_count": 0}, "'llama.block_count' is 0"),
    "layers missing": ({"llama.block_count": None}, "'llama.block_count' is missing"),
    "layers as text": ({"llama.block_count": "two"}, "'llama.block_count' is 'two'"),
    "too many layers": ({"llama.block_count": 513}, "'llama.block_count' is 513"),
    "more predicted layers than layers": (
        {"llama.nextn_predict_layers": 3},
        "'llama.nextn_predict_layers' is 3",
    ),
    "no context": ({"llama.context_length": 0}, "'llama.context_length' is 0"),
    "endless context": ({"llama.context_length": 2**31 - 1}, "'llama.context_length' is 2147483647"),
    "endless vocabulary": ({"llama.vocab_size": 2**32 - 1}, "'llama.vocab_size' is 4294967295"),
    "no vocabulary": ({"tokenizer.ggml.tokens": None}, "the vocabulary has 0 tokens"),
    "too many experts": (experts(count=1025, used_count=2), "'llama.expert_count' is 1025"),
    "no expert used": (experts(count=8), "'llama.expert_used_count' is 0"),
    "more experts used than there are": (experts(count=8, used_count=9), "'llama.expert_used_count' is 9"),
    "experts used without any": (experts(used_count=2), "'llama.expert_used_count' is 2"),
    "more used in one layer": (
        {"llama.expert_count": 4, "llama.expert_used_count": [2, 5]},
        "used_count' is 5",
    ),
    "as many groups as experts": (
        experts(count=8, used_count=2, group_count=8),
        "'llama.expert_group_count' is 8",
    ),
    "groups without experts": (experts(group_count=2), "'llama.expert_group_count' is 2"),
    "uneven groups": (experts(count=8, used_count=2, group_count=3, group_used_count=1), "does not divide"),
    "no group used": (experts(count=8, used_count=2, group_count=2), "'llama.expert_group_used_count' is 0"),
    "all groups used": (
        experts(count=8, used_count=2, group_count=2, group_used_count=2),
        "there are 2 groups",
    ),
    "heads can't be shared": ({"llama.attention.head_count_kv": 3}, "4 heads can't share 3"),
    "in the second layer": (
        {"llama.attention.head_count_kv": [2, 3]},
        "in layer 1 the 4 heads can't share 3",
    ),
    "width can't be shared": ({"llama.embedding_length": 66}, "'llama.embedding_length' is 66"),
    "odd rope": ({"llama.rope.dimension_count": 15}, "'llama.rope.dimension_count' is 15"),
    "unknown rope scaling": ({"llama.rope.scaling.type": "magic"}, "'llama.rope.scaling.type' is 'magic'"),
    "negative epsilon": ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon' is -1.0"),
    "epsilon is no number": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon' is nan"),
    "no tokenizer": ({"tokenizer.ggml.model": None}, "'tokenizer.ggml.model' is ''"),
    "empty tokenizer": ({"tokenizer.ggml.model": "none"}, "'tokenizer.ggml.model' is 'none'"),
    "endless template": ({"tokenizer.chat_template": "x" * (2**20 + 1)}, "has 1048577 characters"),
    "no beginning to add": (
        {"tokenizer.ggml.model": "t5", "tokenizer.ggml.add_bos_token": True},
        "'tokenizer.ggml.bos_token_id' is missing",
    ),
    "beginning beyond the vocabulary": (
        {
            "tokenizer.ggml.model": "t5",
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.bos_token_id": 16,
        },
        "'tokenizer.ggml.bos_token_id' is 16",
    ),
    "endless heads": ({"llama.attention.head_count": 2**31 + 4}, "'llama.attention.head_count' is 2147483652"),
    "endless keys": ({"llama.attention.key_length": 2**31 + 16}, "'llama.attention.key_length' is 2147483664"),
    "endless width": ({"llama.feed_forward_length": [64, 2**31 - 1]}, "'llama.feed_forward_length' is 2147483647"),
    "endless window": ({"llama.attention.sliding_window": 2**31}, "'llama.attention.sliding_window' is 2147483648"),
    "values shorter than keys": (
        {"llama.attention.key_length": 16, "llama.attention.value_length": 8},
        "'llama.attention.key_length' is 16 and 'llama.attention.value_length' is 8",
    ),
    "keys rotated in part": ({"llama.rope.dimension_count": 8}, "'llama.rope.dimension_count' is 8, but heads are 16"),
    "more rotated than there is": (
        other("phi2", rope__dimension_count=32),
        "'phi2.rope.dimension_count' is 32, but heads are 16 long",
    ),
    "odd rope in the window": (
        other("gemma3", rope__dimension_count_swa=15),
        "'gemma3.rope.dimension_count_swa' is 15, not an even number",
    ),
    "nothing rotated": (other("gemma2", rope__dimension_count=0), "'gemma2.rope.dimension_count' is 0"),
    "keys of no length": ({"llama.attention.key_length": 0}, "'llama.attention.key_length' is 0"),
    "no attention": (other("phi3"), "tensor 'blk.0.attn_qkv.weight' is missing"),
    "no sections": (
        other("qwen2vl", rope__dimension_sections=[0, 0, 0, 0]),
        "'qwen2vl.rope.dimension_sections' is [0, 0, 0, 0]",
    ),
    "no heads to divide by": (other("olmo2", attention__head_count=0), "'olmo2.attention.head_count' is 0"),
    "a window for nobody": (
        other("gemma3", attention__sliding_window=8, attention__sliding_window_pattern=[0, 0]),
        "gives no layer a sliding window, but the window is 8",
    ),
    "every layer is the dense one": (
        other("gemma2", attention__sliding_window_pattern=1),
        "gives no layer a sliding window, but the window is 4096",
    ),
    "all keys are somebody else's": (
        other("gemma4", attention__shared_kv_layers=1),
        "'gemma4.attention.shared_kv_layers' is 1 of 2 layers",
    ),
    "every 0th layer": (
        other("qwen3next", full_attention_interval=0),
        "'qwen3next.full_attention_interval' is 0",
    ),
    "experts in every 0th layer": (
        other("ernie4_5-moe", interleave_moe_layer_step=0),
        "'ernie4_5-moe.interleave_moe_layer_step' is 0",
    ),
    "no history": (other("lfm2", shortconv__l_cache=1), "'lfm2.shortconv.l_cache' is 1"),
    "no heads of state": (other("mamba2"), "'mamba2.ssm.time_step_rank' is missing"),
    "state can't be shared": (
        other("mamba2", ssm__time_step_rank=3, ssm__inner_size=128),
        "'mamba2.ssm.inner_size' is 128, which 3 heads can't share",
    ),
    "state of another width": (other("jamba", ssm__inner_size=64), "'jamba.ssm.inner_size' is 64, not twice the width"),
    "bert without its own": ({"tokenizer.ggml.model": "bert"}, "'tokenizer.ggml.bos_token_id' is missing"),
}

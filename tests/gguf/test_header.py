"""The figures that follow from a header, against what is known of real models and of llama.cpp's own allocations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import TENSORS, TensorSpec, tiny_model, write

from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def header_of(folder: Path, changes: dict[str, Any], tensors: tuple[TensorSpec, ...] = TENSORS) -> Header:
    return read_header(write(folder / "tiny.gguf", tiny_model(changes, tensors)))


def model(architecture: str, **settings: Any) -> dict[str, Any]:
    """Metadata of another architecture; a double underscore in a name stands for a dot."""
    named = {f"{architecture}.{name.replace('__', '.')}": value for name, value in settings.items()}
    return {"general.architecture": architecture, **named}


# ---- what a token leaves in the KV cache: name -> (metadata, bytes per token in f16, layers that keep something)

LAYERWISE = [0, 0, 8, 0, 0, 8]
KV: dict[str, tuple[dict[str, Any], int, int]] = {
    # Llama 3.1 8B: 128 KiB per token.
    "grouped heads": (
        model("llama", block_count=32, embedding_length=4096, attention__head_count=32, attention__head_count_kv=8),
        32 * 8 * (128 + 128) * 2, 32,
    ),
    # DeepSeek V3: 61 layers of 576 compressed elements, no values: 68.6 KiB per token.
    "latent attention": (
        model("deepseek2", block_count=61, embedding_length=7168, attention__head_count=128,
              attention__head_count_kv=1, attention__key_length=576, attention__value_length=512,
              attention__key_length_mla=192, attention__value_length_mla=128, attention__kv_lora_rank=512),
        61 * 576 * 2, 61,
    ),
    "latent attention with an indexer": (
        model("deepseek32", block_count=62, nextn_predict_layers=1, embedding_length=7168, attention__head_count=128,
              attention__head_count_kv=1, attention__key_length=576, attention__value_length=512,
              attention__key_length_mla=192, attention__value_length_mla=128, attention__indexer__key_length=128),
        61 * (576 + 128) * 2, 61,
    ),
    # Qwen3-Next: every fourth layer has full attention.
    "every fourth layer": (
        model("qwen3next", block_count=48, embedding_length=2048, attention__head_count=16,
              attention__head_count_kv=2, attention__key_length=256, attention__value_length=256),
        12 * 2 * 512 * 2, 12,
    ),
    "every second layer": (
        model("qwen35", block_count=8, embedding_length=64, attention__head_count=4, attention__head_count_kv=2,
              full_attention_interval=2),
        4 * 2 * 32 * 2, 4,
    ),
    "recurrent layers listed": (
        model("qwen35moe", block_count=4, embedding_length=64, attention__head_count=4, attention__head_count_kv=2,
              attention__recurrent_layers=[1, 1, 1, 0]),
        1 * 2 * 32 * 2, 1,
    ),
    "recurrent layers have no key heads": (
        model("lfm2", block_count=6, embedding_length=2048, attention__head_count=32,
              attention__head_count_kv=LAYERWISE, shortconv__l_cache=3),
        2 * 8 * 128 * 2, 2,
    ),
    "attention beside the state": (
        model("falcon-h1", block_count=4, embedding_length=64, attention__head_count=4, attention__head_count_kv=2,
              ssm__conv_kernel=4, ssm__inner_size=128, ssm__state_size=16, ssm__group_count=1),
        4 * 2 * 32 * 2, 4,
    ),
    "only recurrent": (
        model("mamba", block_count=24, embedding_length=768, attention__head_count=0, ssm__conv_kernel=4,
              ssm__inner_size=1536, ssm__state_size=16),
        0, 0,
    ),
    # Gemma 3n E4B: 35 layers, the last 15 use the keys of earlier ones.
    "shared layers": (
        model("gemma3n", block_count=35, embedding_length=2048, attention__head_count=8, attention__head_count_kv=2,
              attention__key_length=256, attention__value_length=256, attention__sliding_window=512),
        20 * 2 * 512 * 2, 20,
    ),
    "shared layers with other heads in the window": (
        model("gemma4", block_count=4, embedding_length=64, attention__head_count=4, attention__head_count_kv=2,
              attention__key_length=64, attention__value_length=64, attention__key_length_swa=16,
              attention__value_length_swa=16, attention__sliding_window=32, attention__shared_kv_layers=1,
              attention__sliding_window_pattern=[1, 1, 0, 1]),
        (2 * 2 * 32 + 2 * 128) * 2, 3,
    ),
    "predicting layers": (
        model("glm4moe", block_count=5, nextn_predict_layers=1, embedding_length=64, attention__head_count=4,
              attention__head_count_kv=2),
        4 * 2 * 32 * 2, 4,
    ),
    "nothing but nonsense": (
        model("llama", block_count=2**32 - 1, embedding_length=2**32 - 1, attention__head_count=1),
        512 * 2 * (2**32 - 1) * 2, 512,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KV)
def test_kv_cache_of_a_token(folder: Path, name: str) -> None:
    changes, n_bytes, n_layers = KV[name]
    header = header_of(folder, {"llama.attention.head_count_kv": None, **changes})
    assert header.kv_bytes_per_token() == n_bytes
    assert len(header.kv_layers) == n_layers
    assert header.cache_bytes(100, ubatch=512) == 100 * n_bytes


WINDOWS: dict[str, tuple[dict[str, Any], int, int]] = {
    "none": ({}, 0, 0),
    "not used by this architecture": ({"llama.attention.sliding_window": 4096}, 0, 0),
    "gemma 2, by default": (model("gemma2", block_count=26, attention__head_count_kv=2), 4096, 13),
    "gemma 3, five of six": (
        model("gemma3", block_count=26, attention__head_count_kv=2, attention__sliding_window=512), 512, 22,
    ),
    "gemma 3 without": (model("gemma3", block_count=18, attention__head_count_kv=2), 0, 0),
    "gpt-oss": (model("gpt-oss", block_count=24, attention__head_count_kv=2, attention__sliding_window=128), 128, 12),
    "another period": (
        model("cohere2", block_count=8, attention__head_count_kv=2, attention__sliding_window=64,
              attention__sliding_window_pattern=2), 64, 4,
    ),
    "the first is dense": (
        model("smallthinker", block_count=5, attention__head_count_kv=2, attention__sliding_window=64), 4096, 3,
    ),
    "layer by layer": (
        model("gemma4", block_count=3, attention__head_count_kv=2, attention__sliding_window=64,
              attention__sliding_window_pattern=[1, 0, 1]), 64, 2,
    ),
    "llama 4": (model("llama4", block_count=8, attention__head_count_kv=2), 8192, 6),
    "llama 4 without": (
        model("llama4", block_count=8, attention__head_count_kv=2, attention__sliding_window=0), 0, 0,
    ),
    "exaone 4, small": (
        model("exaone4", block_count=30, attention__head_count_kv=2, attention__sliding_window=4096), 0, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_sliding_windows(folder: Path, name: str) -> None:
    changes, window, n_layers = WINDOWS[name]
    architecture = changes.get("general.architecture", "llama")
    header = header_of(folder, {**model(architecture, embedding_length=64, attention__head_count=4), **changes})
    assert (header.sliding_window, header.n_window_layers) == (window, n_layers)


def test_a_window_keeps_only_its_tokens(folder: Path) -> None:
    settings = {"block_count": 2, "embedding_length": 64, "attention__head_count": 4, "attention__head_count_kv": 2}
    header = header_of(folder, model("gemma2", **settings, attention__sliding_window=1000))
    each = 2 * 32 * 2
    assert header.cache_bytes(8192, ubatch=512) == (8192 + 1536) * each  # 1000 + 512, rounded up to 256
    assert header.cache_bytes(256, ubatch=512) == 2 * 256 * each
    assert header.cache_bytes(16_384, ubatch=512, sequences=2) == (16_384 + 2560) * each  # twice 1000, and 512
    factors = TensorSpec("rope_factors_long.weight", (16,), 0, 16 * 4)
    apart = header_of(folder, model("gemma2", **settings, attention__sliding_window=1000), (*TENSORS, factors))
    assert apart.cache_bytes(16_384, ubatch=512, sequences=2) == (16_384 + 2 * 1536) * each
    assert header.cache_shares(8192, ubatch=512) == (1536 / 9728, 8192 / 9728)


def test_states_are_where_their_layers_are(folder: Path) -> None:
    settings = {"block_count": 2, "embedding_length": 64, "attention__head_count": 4}
    recurrent = {"ssm__conv_kernel": 4, "ssm__inner_size": 64, "ssm__state_size": 16, "ssm__group_count": 1}
    hybrid = model("granitehybrid", **settings, **recurrent)
    header = header_of(folder, {**hybrid, "granitehybrid.attention.head_count_kv": [0, 2]})
    state, keys = header.recurrent_bytes, header.cache_bytes(256, ubatch=512)
    assert state > 0
    assert header.cache_shares(256, ubatch=512) == (state / (state + keys), keys / (state + keys))
    assert header.cache_shares(256, ubatch=512, sequences=2)[0] == 2 * state / (2 * state + keys)


STATES: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({}, 0),
    # Mamba 130M: 24 layers of 3 x 1536 convolution inputs and 16 x 1536 states, in f32.
    "mamba": (KV["only recurrent"][0], 24 * (3 * 1536 + 16 * 1536) * 4),
    "lfm2": (KV["recurrent layers have no key heads"][0], 4 * 2048 * 2 * 4),
    "falcon-h1": (KV["attention beside the state"][0], 4 * (3 * (128 + 2 * 16) + 16 * 128) * 4),
    "rwkv7": (
        model("rwkv7", block_count=12, embedding_length=768, wkv__head_size=64, token_shift_count=2),
        12 * (2 * 768 + 768 * 64) * 4,
    ),
    "kimi-linear": (
        model("kimi-linear", block_count=4, embedding_length=64, attention__head_count=4,
              attention__head_count_kv=[0, 0, 0, 1], kda__head_dim=16, ssm__conv_kernel=4),
        3 * (3 * 3 * 64 + 16 * 16 * 4) * 4,
    ),
    "minimax-01": (
        model("minimax-01", block_count=8, embedding_length=64, attention__head_count=4, attention__head_count_kv=4),
        7 * 16 * 16 * 4 * 4,
    ),
    "nemotron_h": (
        model("nemotron_h", block_count=3, embedding_length=64, attention__head_count=4,
              attention__head_count_kv=[0, 2, 0], feed_forward_length=[0, 0, 96], ssm__conv_kernel=4,
              ssm__inner_size=128, ssm__state_size=16, ssm__group_count=1),
        1 * (3 * (128 + 2 * 16) + 16 * 128) * 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_recurrent_state(folder: Path, name: str) -> None:
    changes, n_bytes = STATES[name]
    assert header_of(folder, changes).recurrent_bytes == n_bytes


# ---- weights


def test_quant_mix(folder: Path) -> None:
    header = header_of(folder, {})
    first, second = header.type_shares
    assert (first.type, first.n_tensors, first.n_bytes, first.n_elements) == ("F32", 2, 4352, 1088)
    assert (second.type, second.n_tensors, second.bits_per_weight) == ("Q4_1", 1, 5.0)
    assert header.bits_per_weight == pytest.approx(8 * (4352 + 2560) / (1088 + 4096))
    assert header_of(folder, {}, ()).bits_per_weight == 0.0


def test_active_parameters(folder: Path) -> None:
    experts = (
        TensorSpec("token_embd.weight", (64, 16), 0, 64 * 16 * 4),
        TensorSpec("blk.0.ffn_up_exps.weight", (64, 32, 8), 0, 64 * 32 * 8 * 4),
        TensorSpec("blk.1.ffn_up_exps.weight", (64, 32, 8), 0, 64 * 32 * 8 * 4),
        TensorSpec("blk.1.ffn_up_shexp.weight", (64, 32), 0, 64 * 32 * 4),
    )
    mixture = {"llama.expert_count": 8, "llama.expert_used_count": 2}
    header = header_of(folder, mixture, experts)
    assert (header.n_experts, header.n_experts_used) == (8, 2)
    assert header.n_parameters == 64 * 16 + 2 * 64 * 32 * 8 + 64 * 32
    assert header.n_active_parameters == 64 * 16 + 2 * 64 * 32 * 2 + 64 * 32
    by_layer = header_of(folder, {**mixture, "llama.expert_used_count": [1, 4]}, experts)
    assert by_layer.n_active_parameters == 64 * 16 + 64 * 32 * (1 + 4) + 64 * 32
    dense = header_of(folder, {})
    assert dense.n_active_parameters == dense.n_parameters


# ---- names and texts


def test_who_made_it(folder: Path) -> None:
    header = header_of(
        folder,
        {
            "general.author": "Somebody", "general.license": "mit",
            "general.base_model.0.repo_url": "https://huggingface.co/owner/base",
        },
    )  # fmt: skip
    assert (header.author, header.license, header.base_model) == ("Somebody", "mit", "owner/base")
    header = header_of(folder, {"general.organization": "Some", "general.base_model.0.name": "Base"})
    assert (header.author, header.base_model) == ("Some", "Base")
    header = header_of(folder, {})
    assert (header.author, header.license, header.base_model) == (None, None, None)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (10_000.0, "", 1.0, 0)),
        ({"freq_base": 500_000.0, "scaling.type": "none"}, (500_000.0, "", 1.0, 0)),
        ({"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32},
         (10_000.0, "yarn", 4.0, 32)),
        ({"scale_linear": 2.0}, (10_000.0, "linear", 2.0, 0)),
        ({"freq_base": float("nan"), "scaling.factor": float("inf")}, (10_000.0, "", 1.0, 0)),
    ],
)  # fmt: skip
def test_rope(folder: Path, settings: dict[str, Any], expected: tuple[float, str, float, int]) -> None:
    header = header_of(folder, {f"llama.rope.{name}": value for name, value in settings.items()})
    found = (header.rope_base, header.rope_scaling, header.rope_factor, header.rope_original_context)
    assert found == expected
    assert header.rope_dimensions == header.key_length


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (None, ""),
        ("{{ messages }}", "other"),
        ("<|im_start|>{{ role }}<|im_end|>", "chatml"),
        ("<|im_start|>user<|im_sep|>", "phi4"),
        ("<|start_header_id|>user<|end_header_id|>", "llama3"),
        ("<start_of_turn>model", "gemma"),
        ("[INST] <<SYS>>", "llama2"),
        ("[INST] x [/INST]", "mistral"),
        ("<|start|>assistant<|channel|>final", "gpt-oss"),
        ("<|user|>x<|end|><|assistant|>", "phi3"),
        ("<｜User｜>x<｜Assistant｜>", "deepseek"),
    ],
)
def test_template_kinds(folder: Path, template: str | None, kind: str) -> None:
    header = header_of(folder, {"tokenizer.chat_template": template})
    assert header.template_kind == kind


def test_special_tokens(folder: Path) -> None:
    tokens = [f"t{number}" for number in range(3000)]
    tokens[2999], tokens[1024] = "</s>", b"\xff\x1b"
    header = header_of(
        folder,
        {
            "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.eos_token_id": 2999, "tokenizer.ggml.eot_token_id": 1024,
            "tokenizer.ggml.padding_token_id": 3000,
        },
    )  # fmt: skip
    assert header.special_token("bos") == "t0"
    assert header.special_token("eos") == "</s>"
    assert header.special_token("eot") == "\ufffd\x1b"
    assert header.special_token("padding") is None
    assert header.special_token("nothing") is None
    assert header.tokenizer_pre == "smollm"


def test_long_token_texts_are_cut(folder: Path) -> None:
    header = header_of(folder, {"tokenizer.ggml.tokens": ["x" * 5000], "tokenizer.ggml.bos_token_id": 0})
    assert header.special_token("bos") == "x" * 1024

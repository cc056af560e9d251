"""Hostile values, e.g. numbers in config.json beyond the tensors' sizes: refused before any work."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.effort import loops
from support.hf_writer import (
    ARCHITECTURES,
    N_BYTE_LEVEL,
    N_PIECES,
    files_of,
    llama_like,
    raw_safetensors,
    safetensors,
    write,
)
from support.peft_writer import lora, write_peft

from llmrun.errors import BadModelError, LlmrunError
from llmrun.lab.convert.folder import Folder
from llmrun.lab.convert.job import MAX_ENTRIES, MAX_TEXT, convert_folder, general_metadata
from llmrun.lab.convert.peft import convert_adapter
from llmrun.lab.convert.sentencepiece import read_pieces

LLAMA, QWEN = "LlamaForCausalLM", "Qwen3ForCausalLM"
MOST_BYTES, MOST_LOOPS = 1 << 26, 200
COUNTS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "head_dim",
)  # fmt: skip
OWN_COUNTS = {
    "LlamaForCausalLM": ("vocab_size",),
    "MixtralForCausalLM": ("vocab_size", "num_local_experts", "num_experts_per_tok"),
    "GraniteMoeForCausalLM": ("num_local_experts", "num_experts_per_tok"),
    "Qwen3MoeForCausalLM": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "Gemma2ForCausalLM": ("sliding_window",),
    "Gemma3ForCausalLM": ("sliding_window",),
    "Phi3ForCausalLM": ("original_max_position_embeddings",),
    "BertModel": ("type_vocab_size",),
}
NO_COUNTS: tuple[Any, ...] = (10**9, 2**31 - 1, 2**40, 10**400, 0, -1, 2.5, 4.0, "4", True, [], {}, [[1]], math.nan)
NUMBERS = ("rms_norm_eps", "layer_norm_eps", "rope_theta", "partial_rotary_factor", *(
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"
))  # fmt: skip
NO_NUMBERS: tuple[Any, ...] = (math.nan, math.inf, -math.inf, 1e300, -1e300, 10**400, "1", True, [], {}, [[1.0]])


def refuse(folder: Path, **changes: Any) -> BadModelError:
    """Convert a folder with changes to config.json, which must fail; return the error."""
    path = folder / "config.json"
    before = path.read_text(encoding="utf-8")
    config = json.loads(before)
    config.get("text_config", config).update(changes)
    path.write_text(json.dumps(config), encoding="utf-8")
    try:
        with pytest.raises(LlmrunError) as caught:
            convert_folder(folder, folder.parent / "out.gguf")
    finally:
        path.write_text(before, encoding="utf-8")
    assert isinstance(caught.value, BadModelError), f"{changes}: {caught.value!r}"
    assert caught.value.exit_status == 7
    return caught.value


def refuse_cheaply(folder: Path, **changes: Any) -> BadModelError:
    """Check that refuse() needs little memory and work; return its error."""
    found: list[BadModelError] = []
    tracemalloc.start()
    try:
        effort = loops(lambda: found.append(refuse(folder, **changes)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES, changes
    assert effort < MOST_LOOPS, changes
    return found[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_counts_that_no_tensor_can_bear(architecture: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", files_of(architecture))
    for name in (*COUNTS, *OWN_COUNTS.get(architecture, ())):
        error = refuse_cheaply(folder, **{name: 10**9})
        assert name in error.why
    refuse_cheaply(folder, **dict.fromkeys(COUNTS, 10**9))


@pytest.mark.parametrize("architecture", OWN_COUNTS)
def test_counts_that_are_none(architecture: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", files_of(architecture))
    for name in (*(COUNTS if architecture == LLAMA else ()), *OWN_COUNTS[architecture]):
        for value in NO_COUNTS:
            error = refuse(folder, **{name: value})
            assert name in error.why
            assert len(error.why) < 300


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GraniteForCausalLM", "Phi3ForCausalLM", "BertModel"])
def test_numbers_that_are_none(architecture: str, tmp_path: Path) -> None:
    used = {
        "BertModel": NUMBERS[1:2],
        "GraniteForCausalLM": (NUMBERS[0], *NUMBERS[2:]),
    }.get(architecture, (NUMBERS[0], *NUMBERS[2:4]))
    folder = write(tmp_path / "in", files_of(architecture))
    for name in used:
        for value in NO_NUMBERS:
            assert name in refuse(folder, **{name: value}).why


def test_a_billion_layers_with_what_is_made_for_each(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    llama = write(tmp_path / "llama" / "in", files_of(LLAMA))
    refuse_cheaply(llama, head_dim=2**31 - 2, rope_scaling=scaling)
    for architecture in ("SmolLM3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM"):
        folder = write(tmp_path / architecture / "in", files_of(architecture))
        error = refuse_cheaply(folder, num_hidden_layers=10**9, num_local_experts=10**9)
        assert "num_hidden_layers is '1000000000'" in error.why


@pytest.mark.parametrize(
    ("architecture", "changes", "tensor"),
    [
        (LLAMA, {"num_attention_heads": 2}, "k_proj"),
        (LLAMA, {"num_key_value_heads": 4}, "k_proj"),
        (LLAMA, {"head_dim": 32}, "q_proj"),
        (LLAMA, {"intermediate_size": 97}, "gate_proj"),
        (LLAMA, {"hidden_size": 68}, "embed_tokens"),
        (QWEN, {"head_dim": 8}, "q_proj"),
        ("Olmo2ForCausalLM", {"num_key_value_heads": 1}, "k_proj"),
        ("Phi3ForCausalLM", {"num_key_value_heads": 4}, "qkv_proj"),
        ("Phi3ForCausalLM", {"intermediate_size": 95}, "gate_up_proj"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 16}, "exps"),
        ("MixtralForCausalLM", {"intermediate_size": 16}, "exps"),
        ("GraniteMoeForCausalLM", {"num_local_experts": 3}, "router"),
        ("BertModel", {"max_position_embeddings": 64}, "position_embeddings"),
        ("BertModel", {"type_vocab_size": 3}, "token_type_embeddings"),
    ],
)
def test_a_shape_that_the_config_does_not_describe(
    architecture: str, changes: dict[str, Any], tensor: str, tmp_path: Path
) -> None:
    error = refuse(write(tmp_path / "in", files_of(architecture)), **changes)
    assert tensor in error.what or tensor in error.why
    assert "has the shape" in error.what or "heads of even length" in error.why


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (LLAMA, {"hidden_act": 5}),
        (LLAMA, {"hidden_act": ["silu"]}),
        (LLAMA, {"tie_word_embeddings": "no"}),
        (LLAMA, {"rope_scaling": "yarn"}),
        (LLAMA, {"rope_scaling": {"rope_type": ["yarn"]}}),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**12}}),
        (LLAMA, {"quantization_config": []}),
        (QWEN, {"use_sliding_window": "yes"}),
        ("Phi3ForCausalLM", {"original_max_position_embeddings": 1, "rope_scaling": {"type": "longrope"}}),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1e308}),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": "no"}),
        ("BertModel", {"is_decoder": 0}),
        ("BertModel", {"num_attention_heads": 3}),
    ],
)
def test_values_of_another_type(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    refuse(write(tmp_path / "in", files_of(architecture)), **changes)


def no_columns() -> bytes:
    """Return a file with embeddings of 2**58 rows and no columns: zero bytes."""
    tensors = llama_like(N_BYTE_LEVEL, head_norms=True)
    raw = safetensors({name: values for name, values in tensors.items() if "embed_tokens" not in name})
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.embed_tokens.weight"] = {"dtype": "F32", "shape": [2**58, 0], "data_offsets": [0, 0]}
    return raw_safetensors(header, raw[8 + length :])


@pytest.mark.parametrize(
    ("architecture", "files"),
    [
        (QWEN, {"model.safetensors": no_columns()}),
        (QWEN, {"model.safetensors": (2**63).to_bytes(8, "little") + b"{}"}),
        (QWEN, {"model.safetensors": (10**8).to_bytes(8, "little") + b"{}"}),
        (QWEN, {"model.safetensors": raw_safetensors(
            {"x" * 10**6: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4)}),
        (QWEN, {"model.safetensors.index.json": {"weight_map": {"a": "x" * 5000 + ".safetensors"}}}),
        (QWEN, {"model.safetensors.index.json": {"weight_map": {"a": "x\0.safetensors"}}}),
        (QWEN, {"tokenizer_config.json": {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}}),
        (QWEN, {"tokenizer_config.json": {"chat_template": [{"name": [], "template": 5}]}}),
    ],
)  # fmt: skip
def test_hostile_lengths_and_names(architecture: str, files: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "in", files_of(architecture) | files)
    found: list[LlmrunError] = []

    def convert() -> None:
        with pytest.raises(LlmrunError) as caught:
            convert_folder(folder, tmp_path / "out.gguf")
        found.append(caught.value)

    assert loops(convert) < 20 * MOST_LOOPS
    assert len(str(found[0])) < 8000


def test_pieces_are_counted_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.lab.convert.sentencepiece.MAX_PIECES", 10)
    with pytest.raises(BadModelError, match="more than 10 pieces"):
        read_pieces(b"\x0a\x03\x0a\x01x" * 12 + b"\xff")


def test_a_card_that_grows_without_end_is_left_out(tmp_path: Path) -> None:
    rows = "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40))
    card = f"---\na0: &a0 {{k: v}}\n{rows}license: 0x{'f' * 9000}\n---\n"
    folder = write(tmp_path / "in", files_of(LLAMA) | {"README.md": card})
    assert loops(lambda: convert_folder(folder, tmp_path / "out.gguf")) < MOST_LOOPS
    folder = write(tmp_path / "in", {"README.md": f"---\nlicense: 0x{'f' * 9000}\n---\n"})
    convert_folder(folder, tmp_path / "out.gguf")


def test_a_card_with_values_of_other_types_and_lengths(tmp_path: Path) -> None:
    rows = {"name": {"a": 1}, "author": [1], "license": "x" * 9000, "tags": [None, "y" * 9000], "language": 5}
    rows |= {"base_model": ["owner/" + "Name-" * 900, *([{"name": 5}, "", "a//b"] * 200)], "datasets": {}, "5": 5}
    files = {"README.md": f"---\n{json.dumps(rows)}\n---\n", "config.json": {}}
    advice = {"top_k": 2**31, "mirostat": 1e300, "temperature": 10**400, "min_p": [0.1]}
    folder = write(tmp_path / "Tiny-1B", {**files, "generation_config.json": advice})
    found = general_metadata(Folder(folder), {"_name_or_path": ["x"]}, 10**9, "1B")
    assert found["general.name"] == "Tiny 1B"
    assert len(found["general.license"]) == len(found["general.tags"][0]) == MAX_TEXT
    assert found["general.base_model.count"] <= MAX_ENTRIES
    assert not any("sampling" in key or "author" in key for key in found)


@pytest.mark.parametrize(
    "changes",
    [
        {"alpha_pattern": {"(a+)+$": 1}},
        {"alpha_pattern": {".*.*.*.*.*.*.*x": 1}},
        {"alpha_pattern": {"[": 1}},
        {"alpha_pattern": {"x" * 1000: 1}},
        {"alpha_pattern": {"q_proj": "1"}},
        {"alpha_pattern": []},
        {"lora_alpha": "6"},
        {"lora_alpha": True},
        {"lora_alpha": 1e-320},
        {"lora_alpha": 10**400},
        {"use_rslora": True, "r": 2**60},
        {"use_rslora": True, "r": 0},
        {"use_rslora": "yes"},
        {"peft_type": []},
    ],
)
def test_hostile_adapters(changes: dict[str, Any], tmp_path: Path) -> None:
    base = write(tmp_path / "base", files_of(LLAMA))
    adapter = write_peft(tmp_path / "adapter", lora(llama_like(N_PIECES), "q_proj"), **changes)

    def convert() -> None:
        with pytest.raises(LlmrunError):
            convert_adapter(adapter, base, tmp_path / "out.gguf")

    assert loops(convert) < MOST_LOOPS


def test_an_adapter_of_rank_0_and_a_base_of_a_billion_layers(tmp_path: Path) -> None:
    base = write(tmp_path / "base", files_of(LLAMA))
    place = "base_model.model.model.layers.0.self_attn.q_proj"
    empty = {f"{place}.lora_A.weight": np.zeros((0, 64), "<f4"), f"{place}.lora_B.weight": np.zeros((64, 0), "<f4")}
    with pytest.raises(BadModelError, match="have the shapes"):
        convert_adapter(write_peft(tmp_path / "empty", empty), base, tmp_path / "out.gguf")
    adapter = write_peft(tmp_path / "adapter", lora(llama_like(N_PIECES), "q_proj"))
    write(base, {"config.json": files_of(LLAMA, num_hidden_layers=10**9)["config.json"]})
    with pytest.raises(BadModelError, match="num_hidden_layers"):
        convert_adapter(adapter, base, tmp_path / "out.gguf")
    named = write_peft(tmp_path / "named", lora(llama_like(N_PIECES), "q_proj"), base_model_name_or_path="x" * 5000)
    with pytest.raises(LlmrunError, match="not named"):
        convert_adapter(named, None, tmp_path / "out.gguf")

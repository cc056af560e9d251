"""Converted PEFT folders: logits against those of the merged model, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.convert_golden import COLUMNS
from support.hf_writer import N_BYTE_LEVEL, N_PIECES, Tensors, files_of, write
from support.peft_writer import (
    GOLDEN_CASES,
    GOLDENS,
    IDS,
    RANK,
    adapted_model,
    adapter_folders,
    lora,
    weights_of,
    write_peft,
)
from support.plain_logits import computed, loaded

from llmrun.errors import BadModelError, LlmrunError, ModelNotFoundError, UsageError
from llmrun.gguf.adapter import adapter_facts, check_fits
from llmrun.gguf.reader import read_header
from llmrun.lab.convert.job import convert_folder
from llmrun.lab.convert.peft import convert_adapter
from llmrun.protocol.adapters import Adapter

FOUND: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))
ALL = ("self_attn", "mlp")
EXACT = {"kv_type_k": "f32", "kv_type_v": "f32", "flash_attention": "off"}


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("LlamaForCausalLM", ALL),
        ("LlamaForCausalLM", ("q_proj", "v_proj", "embed_tokens", "lm_head")),
        ("Qwen2ForCausalLM", ALL),
        ("Qwen3ForCausalLM", ALL),
        ("Gemma3ForCausalLM", ALL),
        ("GraniteForCausalLM", ALL),
        ("Olmo2ForCausalLM", ALL),
        ("Phi3ForCausalLM", ("qkv_proj", "gate_up_proj", "down_proj")),
        ("MixtralForCausalLM", ("self_attn",)),
    ],
)
def test_an_adapter_computes_what_the_merged_model_does(
    architecture: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    files = adapted_model(tmp_path, architecture, *names)
    # ggml's table of GELU has float16 values: where one is rounded otherwise, all behind it differ a little.
    assert_equal(files.base, files.adapter, files.merged, 1e-2 if architecture.startswith("Gemma") else 1e-3)


@pytest.mark.parametrize("changes", [{"use_rslora": True}, {"lora_alpha": 0.5}, {"alpha_pattern": {"_proj": 6}}])
def test_scales_are_those_of_peft(changes: dict[str, Any], tmp_path: Path) -> None:
    files = adapted_model(tmp_path, "LlamaForCausalLM", **changes)
    assert_equal(files.base, files.adapter, files.merged)


def assert_equal(base: Path, adapter: Path, merged: Path, most: float = 1e-3) -> None:
    with loaded(base) as model, loaded(merged) as other:
        n_vocab = model.vocabulary.n_tokens
        found = computed(model, IDS, n_vocab, adapters=(Adapter("style", str(adapter)),), **EXACT)
        wanted = computed(other, IDS, n_vocab, **EXACT)
        assert np.abs(computed(model, IDS, n_vocab, **EXACT) - wanted).max() > 0.1, "it makes a difference"
    assert np.abs(found - wanted).max() < most


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    """peft_goldens.json was made by tests/upstream/peft_goldens.py."""
    base, peft = adapter_folders(tmp_path, case)
    convert_folder(base, tmp_path / "base.gguf", type="f32")
    convert_adapter(peft, base, tmp_path / "style.gguf")
    wanted = np.array(FOUND["logits"][case])
    with loaded(tmp_path / "base.gguf") as model:
        adapters = (Adapter("style", str(tmp_path / "style.gguf")),)
        found = computed(model, IDS, model.vocabulary.n_tokens, adapters=adapters, **EXACT)
    assert np.linalg.norm(found[:, ::COLUMNS] - wanted) < 1e-3 * np.linalg.norm(wanted)


def folders(place: Path, **changes: Any) -> tuple[Path, Path]:
    """Write a base and an adapter for it."""
    files = files_of("LlamaForCausalLM")
    return write(place / "base", files), write_peft(place / "style", lora(weights_of(files)), **changes)


def test_a_gguf_file_will_do_for_a_base(tmp_path: Path) -> None:
    base, peft = folders(tmp_path)
    convert_folder(base, tmp_path / "base.gguf")
    convert_adapter(peft, base, tmp_path / "one.gguf")
    convert_adapter(peft, tmp_path / "base.gguf", tmp_path / "two.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def test_the_base_that_the_adapter_names_is_found(tmp_path: Path) -> None:
    base, _ = folders(tmp_path)
    peft = folders(tmp_path, base_model_name_or_path=str(base))[1]
    convert_adapter(peft, None, tmp_path / "one.gguf")
    assert read_header(tmp_path / "one.gguf").base_model == "Base"


def test_what_the_file_says(tmp_path: Path) -> None:
    base, peft = folders(tmp_path)
    done = convert_adapter(peft, base, tmp_path / "one.gguf")
    facts = adapter_facts(read_header(tmp_path / "one.gguf"))
    assert (facts.ranks, facts.alpha, facts.header.base_model) == ((RANK,), 6.0, "somebody/Tiny-1B")
    assert (facts.header.architecture, done.type, done.n_tensors) == ("llama", "F32", 2 * 2 * 7)
    assert len(facts.pairs) == 2 * 7
    convert_folder(base, tmp_path / "base.gguf")
    check_fits(facts, read_header(tmp_path / "base.gguf"))


def test_types_that_are_asked_for(tmp_path: Path) -> None:
    base, peft = folders(tmp_path)
    convert_adapter(peft, base, tmp_path / "one.gguf", type="q8_0")
    types = {tensor.name[-6:]: tensor.type for tensor in read_header(tmp_path / "one.gguf").tensors}
    assert types == {"lora_a": "Q8_0", "lora_b": "F16"}, "rows of four numbers don't divide into blocks"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"alora_invocation_tokens": [1]}, "activated"),
        ({"base_model_name_or_path": "somebody/Tiny-1B"}, "--base"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"r": None, "use_rslora": True}, "r is missing"),
    ],
)
def test_what_a_file_cannot_say_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    base, peft = folders(tmp_path, **changes)
    with pytest.raises((UsageError, BadModelError)) as caught:
        convert_adapter(peft, None if named == "--base" else base, tmp_path / "one.gguf")
    assert named in f"{caught.value} {caught.value.hint}"
    assert not (tmp_path / "one.gguf").exists()


def test_tensors_that_have_no_place_are_refused(tmp_path: Path) -> None:
    base, peft = folders(tmp_path)
    matrices = lora(weights_of(files_of("LlamaForCausalLM")))
    first = next(iter(matrices))
    cases: list[tuple[Tensors, str]] = [
        ({**matrices, "base_model.model.score.weight": matrices[first]}, "score.weight"),
        ({name.replace("q_proj", "w_proj"): values for name, values in matrices.items()}, "w_proj"),
        ({name.replace("layers.1", "layers.7"): values for name, values in matrices.items()}, "layers.7"),
        ({name: values for name, values in matrices.items() if name != first}, "only one"),
        ({**matrices, first: matrices[first][:2]}, "shapes"),
        ({}, "no tensors"),
    ]
    for changed, named in cases:
        write_peft(peft, changed)
        with pytest.raises(LlmrunError, match=named):
            convert_adapter(peft, base, tmp_path / "one.gguf")


@pytest.mark.parametrize("as_gguf", [False, True])
def test_embeddings_that_are_the_output_too_are_refused(as_gguf: bool, tmp_path: Path) -> None:
    """llama.cpp would abort."""
    files = files_of("Gemma3ForCausalLM")
    base = write(tmp_path / "base", files)
    peft = write_peft(tmp_path / "style", lora(weights_of(files), "embed_tokens"))
    if as_gguf:
        base = convert_folder(base, tmp_path / "base.gguf").path
    with pytest.raises(UsageError, match="embed_tokens"):
        convert_adapter(peft, base, tmp_path / "one.gguf")


def test_a_base_that_it_does_not_fit_is_refused(tmp_path: Path) -> None:
    _, peft = folders(tmp_path)
    other = write(tmp_path / "qwen", files_of("Qwen2ForCausalLM", num_hidden_layers=2))
    convert_folder(other, tmp_path / "qwen.gguf")
    convert_adapter(peft, tmp_path / "qwen.gguf", tmp_path / "one.gguf")  # it has the same shapes: nobody can tell
    matrices = {name: values[:, :32] if "lora_A" in name else values for name, values in lora(
        weights_of(files_of("LlamaForCausalLM"))).items()}  # fmt: skip
    with pytest.raises(UsageError, match="does not fit"):
        convert_adapter(write_peft(peft, matrices), tmp_path / "qwen.gguf", tmp_path / "one.gguf")


def test_missing_files_are_named(tmp_path: Path) -> None:
    base, peft = folders(tmp_path)
    (peft / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"adapter_model\.safetensors"):
        convert_adapter(peft, base, tmp_path / "one.gguf")
    (base / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        convert_adapter(peft, base, tmp_path / "one.gguf")


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    base, peft = folders(tmp_path)
    (peft / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": "much"}))
    with pytest.raises(BadModelError, match="lora_alpha"):
        convert_adapter(peft, base, tmp_path / "one.gguf")


def test_vocabularies_are_long_enough_for_the_ids() -> None:
    assert max(IDS) < min(N_PIECES, N_BYTE_LEVEL)

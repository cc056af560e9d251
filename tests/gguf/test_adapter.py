"""Headers of LoRA adapters: what they say, what is wrong with them, and which model they fit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import TensorSpec, lora_tensors, tiny_adapter, tiny_model, write

from llmrun.errors import BadModelError, LlmrunError, UsageError
from llmrun.gguf.adapter import AdapterFacts, adapter_facts, check_fits, is_adapter
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check


def adapter(
    folder: Path, changes: Mapping[str, Any] | None = None, tensors: list[TensorSpec] | None = None
) -> AdapterFacts:
    return adapter_facts(read_header(write(folder / "style.gguf", tiny_adapter(changes, tensors))))


def model(folder: Path, changes: Mapping[str, Any] | None = None) -> Header:
    return read_header(write(folder / "tiny.gguf", tiny_model(changes)))


def test_what_an_adapter_says(tmp_path: Path) -> None:
    facts = adapter(tmp_path)
    assert (facts.ranks, facts.alpha, list(facts.pairs)) == ((4,), 8.0, ["blk.0.attn_q.weight"])
    assert is_adapter(facts.header)
    check_fits(facts, model(tmp_path))


def test_embeddings_are_turned_round(tmp_path: Path) -> None:
    name = "token_embd.weight"
    pair = [TensorSpec(f"{name}.lora_a", (4, 16), 0, 256), TensorSpec(f"{name}.lora_b", (4, 64), 0, 1024)]
    facts = adapter(tmp_path, tensors=pair)
    assert facts.ranks == (4,)
    with pytest.raises(UsageError, match="output matrix"):
        check_fits(facts, model(tmp_path))


def test_norms_are_passed_over_as_llama_cpp_does(tmp_path: Path) -> None:
    norm = TensorSpec("blk.0.attn_norm.weight", (64,), 0, 256)
    assert list(adapter(tmp_path, tensors=[*lora_tensors(), norm]).pairs) == ["blk.0.attn_q.weight"]


@pytest.mark.parametrize(
    ("changes", "tensors", "named"),
    [
        ({"adapter.type": "control_vector"}, None, "'control_vector'"),
        ({"adapter.type": None}, None, "None"),
        ({"adapter.lora.alpha": None}, None, "alpha' is missing"),
        ({"adapter.lora.alpha": "8"}, None, "alpha' is '8'"),
        ({"adapter.lora.alpha": float("inf")}, None, "alpha' is inf"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, None, "activated"),
        ({}, lora_tensors()[:1], "only one of two"),
        ({}, [lora_tensors(rank=4)[0], lora_tensors(rank=8)[1]], "64 x 4 and 8 x 64"),
        ({}, [*lora_tensors(), TensorSpec("blk.0.attn_q.bias", (64,), 0, 256)], "attn_q.bias"),
        ({}, [TensorSpec("blk.0.attn_norm.weight", (64,), 0, 256)], "changes nothing"),
        ({}, [TensorSpec(each.name, each.shape, 24, 256) for each in lora_tensors()], "type I8"),
    ],
)
def test_what_is_wrong_with_an_adapter(
    changes: dict[str, Any], tensors: list[TensorSpec] | None, named: str, tmp_path: Path
) -> None:
    with pytest.raises(BadModelError) as caught:
        adapter(tmp_path, changes, tensors)
    assert named in str(caught.value)


def test_a_model_is_no_adapter_and_an_adapter_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a LoRA adapter"):
        adapter_facts(model(tmp_path))
    with pytest.raises(BadModelError) as caught:
        check(adapter(tmp_path).header)
    assert caught.value.hint == f"llmrun run somebody/Tiny --lora {tmp_path / 'style.gguf'}"


@pytest.mark.parametrize(
    ("changes", "tensors", "named"),
    [
        ({"general.architecture": "qwen2"}, None, "it is for 'qwen2' models"),
        ({}, lora_tensors("blk.9.attn_q.weight"), "no tensor 'blk.9.attn_q.weight'"),
        ({}, lora_tensors(n_in=128), "is 128 x 64, the model's 64 x 64"),
        ({}, lora_tensors(n_out=32), "is 64 x 32, the model's 64 x 64"),
    ],
)
@pytest.mark.parametrize("says_base", [True, False])
def test_another_model_is_refused_by_name(
    changes: dict[str, Any], tensors: list[TensorSpec] | None, named: str, says_base: bool, tmp_path: Path
) -> None:
    unnamed = {} if says_base else {"general.base_model.0.repo_url": None}
    facts = adapter(tmp_path, {**changes, **unnamed}, tensors)
    with pytest.raises(UsageError) as caught:
        check_fits(facts, model(tmp_path))
    assert caught.value.what == "the adapter style.gguf does not fit tiny.gguf"
    assert named in caught.value.why
    assert ("somebody/Tiny" in caught.value.why) == says_base
    assert ("llmrun run somebody/Tiny" in caught.value.hint) == says_base


@pytest.mark.parametrize("at", range(0, 700, 7))
def test_a_damaged_file_is_refused_or_read(at: int, tmp_path: Path) -> None:
    data = bytearray(tiny_adapter())
    data[at % len(data)] ^= 0xFF
    with suppress(LlmrunError):
        check_fits(adapter_facts(read_header(write(tmp_path / "style.gguf", bytes(data)))), model(tmp_path))

"""Which models draft for which, and what both take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import gguf, runnable_tensors, tiny_model, write

from llmrun.errors import BadModelError, OutOfMemoryError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.models.registry import ModelSpec
from llmrun.planning.hardware import Hardware
from llmrun.planning.pairs import DraftFile, plan_pair, read_draft
from llmrun.planning.plan import make_plan
from llmrun.planning.preferences import LoadPreferences

MIB = 1 << 20
MACHINE = Hardware("Some CPU", ("avx2",), 4, 8, None, 16 << 30, 12 << 30)
TOKENS = [f"t{number}" for number in range(300)]


def model(folder: Path, name: str, **metadata: Any) -> Header:
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    return read_header(write(folder / f"{name}.gguf", tiny_model({"tokenizer.ggml.tokens": TOKENS, **keys})))


def drafts_for(folder: Path, target: dict[str, Any], draft: dict[str, Any]) -> Header:
    small = model(folder, "small", **draft)
    return read_draft(model(folder, "large", **target), DraftFile("small", small.path))


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ({}, {}),
        ({}, {"tokenizer__ggml__tokens": TOKENS[:200]}),
        ({}, {"tokenizer__ggml__tokens": [*"abcde", *TOKENS[5:]]}),
        ({"tokenizer__ggml__eos_token_id": 7}, {"tokenizer__ggml__eos_token_id": 8}),
        ({"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 1}, {}),
    ],
)
def test_vocabularies_that_llama_cpp_would_take(tmp_path: Path, target: dict[str, Any], draft: dict[str, Any]) -> None:
    assert drafts_for(tmp_path, target, draft).path.name == "small.gguf"


@pytest.mark.parametrize(
    ("target", "draft", "why"),
    [
        ({}, {"tokenizer__ggml__model": "llama"}, "their tokenizers are of different kinds: llama and gpt2"),
        ({}, {"tokenizer__ggml__tokens": TOKENS[:171]}, "their vocabularies differ: 171 tokens and 300"),
        (
            {},
            {"tokenizer__ggml__tokens": [*TOKENS[:7], "other", *TOKENS[8:]]},
            "their vocabularies differ: token 7 is 'other' and 't7'",
        ),
        (
            {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 1},
            {"tokenizer__ggml__bos_token_id": 2},
            "their prompts have different BOS tokens",
        ),
        (
            {"tokenizer__ggml__add_eos_token": True},
            {"tokenizer__ggml__add_eos_token": False},
            "their prompts have different EOS tokens",
        ),
    ],
)
def test_a_wrong_pair_is_refused_with_the_reason(
    tmp_path: Path, target: dict[str, Any], draft: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError) as refused:
        drafts_for(tmp_path, target, draft)
    error = refused.value
    assert (error.what, error.why) == ("small can't draft for large.gguf", why)
    assert error.hint == "give a smaller model of the same family"


def test_a_drafter_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    drafter = write(tmp_path / "eagle3-small.gguf", gguf({"general.architecture": "eagle3"}, runnable_tensors()))
    with pytest.raises(UsageError) as refused:
        read_draft(model(tmp_path, "large"), DraftFile("small", drafter))
    assert refused.value.what == "small can't draft for large.gguf"
    assert refused.value.why == "it is an EAGLE-3 head, with which llmrun can't draft yet"
    assert refused.value.hint.startswith("leave out --draft")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(BadModelError):
        read_draft(model(tmp_path, "large"), DraftFile("small", tmp_path / "small.gguf"))


def test_both_are_planned_with_the_same_window(tmp_path: Path) -> None:
    large = model(tmp_path, "large", llama__context_length=2048)
    small = model(tmp_path, "small", llama__context_length=64)
    wishes = LoadPreferences(threads=3, parallel=4)
    alone = make_plan(large, MACHINE, wishes)
    plan = plan_pair(large, DraftFile("small", small.path), MACHINE, wishes, name="large", repository="")
    beside = plan.load.draft
    assert beside is not None
    assert plan.draft is not None
    assert (beside.n_ctx, beside.threads, beside.n_seq_max) == (plan.load.n_ctx, 3, 4)
    assert (beside.path, plan.draft.path) == (str(small.path), small.path)
    assert beside.n_parked == 0 < plan.load.n_parked, "it drafts for those that run"
    assert plan.draft_bytes == plan.memory.weights + plan.memory.kv - alone.memory.weights - alone.memory.kv > 0
    assert "of that for the draft model" in plan.summary
    assert plan_pair(large, None, MACHINE, wishes, name="large", repository="") == alone


def test_the_window_is_what_fits_beside_the_draft_model(tmp_path: Path) -> None:
    window = {"llama__context_length": 1 << 17, "llama__block_count": 64}
    large, small = model(tmp_path, "large", **window), model(tmp_path, "small", **window)
    machine = replace(MACHINE, memory_available=2048 * MIB)
    alone = make_plan(large, machine, LoadPreferences())
    pair = DraftFile("small", small.path)
    plan = plan_pair(large, pair, machine, LoadPreferences(), name="large", repository="")
    assert plan.load.n_ctx < alone.load.n_ctx
    assert plan.ram_bytes <= machine.memory_available
    with pytest.raises(OutOfMemoryError):
        plan_pair(large, pair, machine, LoadPreferences(n_ctx=alone.load.n_ctx), name="large", repository="")


def test_a_draft_model_is_found_again_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("small.gguf")
    assert DraftFile.of(ModelSpec("small", path=path), path).name == str(tmp_path / path)
    assert DraftFile.of(ModelSpec("smollm2"), path).name == "smollm2"

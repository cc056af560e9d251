"""Every rule: the smallest change that breaks it is found, and the message names field and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.broken_headers import BROKEN, experts, other
from support.effort import loops
from support.gguf_writer import TENSORS, TensorSpec, gguf, metadata, tiny_model, write

from llmrun.errors import BadModelError
from llmrun.gguf.reader import Header, read_header
from llmrun.gguf.rules import cause_of_crash, check, check_crashes, check_vocabulary


def header_of(folder: Path, changes: dict[str, Any], tensors: tuple[TensorSpec, ...] = TENSORS) -> Header:
    return read_header(write(folder / "tiny.gguf", tiny_model(changes, tensors)))


REFUSED = {
    "no architecture", "projector", "adapter", "no layers", "layers missing", "layers as text", "too many layers",
    "more predicted layers than layers", "no context", "endless context", "endless vocabulary", "no vocabulary",
    "endless template", "endless heads", "endless keys", "endless width", "endless window", "nothing rotated",
}  # fmt: skip
"""What is not tried: no models, counts that overflow, and what llama.cpp never returns from."""


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_beforehand(tmp_path: Path, name: str) -> None:
    changes, words = BROKEN[name]
    with pytest.raises(BadModelError) as caught:
        check(header_of(tmp_path, changes))
    assert words in caught.value.why


def test_draft_layers_without_a_model_are_refused(tmp_path: Path) -> None:
    changes = {"llama.block_count": 2, "llama.nextn_predict_layers": 1}
    draft = TensorSpec("blk.1.nextn.enorm.weight", (64,), 0, 256)
    with pytest.raises(BadModelError) as caught:
        check(header_of(tmp_path, changes, (draft,)))
    assert "only layers for multi-token prediction" in caught.value.why
    assert caught.value.hint.startswith("llmrun run MODEL --draft ")
    check(header_of(tmp_path, changes, (draft, TensorSpec("blk.0.attn_norm.weight", (64,), 0, 256))))


@pytest.mark.parametrize(
    ("architecture", "tensor", "kind", "words"),
    [
        ("eagle3", "fc.weight", "eagle3", "an EAGLE-3 head"),
        ("dflash", "fc.weight", "dflash", "a DFlash drafter"),
        ("dflash", "markov_w1.weight", "dspark", "a DSpark drafter"),
        ("gemma4-assistant", "fc.weight", "gemma4-assistant", "a prediction head of Gemma 4 (MTP)"),
    ],
)
def test_files_that_only_draft_are_named(tmp_path: Path, architecture: str, tensor: str, kind: str, words: str) -> None:
    facts = {"general.architecture": architecture, f"{architecture}.target_layers": [2, 18, 33]}
    header = read_header(write(tmp_path / "drafter.gguf", gguf(facts, [TensorSpec(tensor, (64,), 0, 256)])))
    assert (header.draft_kind, header.target_layers) == (kind, (2, 18, 33))
    with pytest.raises(BadModelError) as caught:
        check(header)
    assert caught.value.what == f"'drafter.gguf' is {words}, not a model"


@pytest.mark.parametrize("name", sorted(BROKEN.keys() - REFUSED))
def test_what_explains_a_crash_is_tried_first(tmp_path: Path, name: str) -> None:
    changes, words = BROKEN[name]
    header = header_of(tmp_path, changes)
    check(header)
    with pytest.raises(BadModelError) as caught:
        check_crashes(header)
    assert words in caught.value.why
    reason = cause_of_crash(header.path)
    assert reason is not None
    assert words in reason.why


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (TensorSpec("blk.0.attn_norm.weight", (64,), 1, 128), "'blk.0.attn_norm.weight' has the type F16"),
        (TensorSpec("blk.0.attn_q.bias", (64,), 8, 68), "'blk.0.attn_q.bias' has the type Q8_0"),
        (TensorSpec("token_embd.weight", (64, 16), 28, 8192), "'token_embd.weight' has the type F64"),
        (TensorSpec("blk.0.ffn_up.weight", (64, 16), 26, 4096), "'blk.0.ffn_up.weight' has the type I32"),
        (TensorSpec("blk.0.ffn_up.weight", (64, 16), 9, 32 * 36), "'blk.0.ffn_up.weight' has the type Q8_1"),
        (TensorSpec("anything", (256,), 15, 292), "'anything' has the type Q8_K"),
        (TensorSpec("rope_freqs.weight", (8,), 1, 16), "'rope_freqs.weight' has the type F16"),
    ],
)
def test_tensor_types_that_kill(tmp_path: Path, tensor: TensorSpec, words: str) -> None:
    with pytest.raises(BadModelError) as caught:
        check_crashes(header_of(tmp_path, {}, (tensor,)))
    assert words in caught.value.why


def test_data_that_is_not_aligned(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", gguf({**metadata(), "general.alignment": 1}, TENSORS, alignment=1))
    with pytest.raises(BadModelError, match="not a multiple of 32"):
        check_crashes(read_header(path))


def test_tables_of_numbers_may_be_whole(tmp_path: Path) -> None:
    check_crashes(header_of(tmp_path, {}, (TensorSpec("blk.0.ffn_gate_tid2eid", (4, 4), 26, 64), *TENSORS)))


def test_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(BadModelError, match="no tensors"):
        check(header_of(tmp_path, {}, ()))


FINE: dict[str, dict[str, Any]] = {
    "plain": {},
    "experts": experts(count=8, used_count=2, group_count=4, group_used_count=2),
    "hunyuan's single expert": {
        "general.architecture": "hunyuan-vl", "hunyuan-vl.block_count": 1, "hunyuan-vl.context_length": 8,
        "hunyuan-vl.embedding_length": 8, "hunyuan-vl.expert_count": 1, "hunyuan-vl.expert_used_count": 0,
    },
    "partly rotated": other("phi2", rope__dimension_count=8),
    "keys longer than values": other("deepseek2", attention__key_length=24, attention__value_length=16),
    "windows": other("gemma3", attention__sliding_window=8),
    "a state's heads": other("mamba2", ssm__time_step_rank=4, ssm__inner_size=128),
    "recurrent layers": {"llama.attention.head_count_kv": [0, 2]},
    "stated heads": {"llama.embedding_length": 66, "llama.attention.key_length": 16},
    "beginning by default": {"tokenizer.ggml.add_bos_token": True},
    "beginning stated": {
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FINE)
def test_good_headers_pass(tmp_path: Path, name: str) -> None:
    check(header_of(tmp_path, FINE[name]))
    check_crashes(header_of(tmp_path, FINE[name]))


# ---- vocabulary

_BYTES = [f"<0x{number:02X}>" for number in range(256)]


def test_good_vocabularies_pass(tmp_path: Path) -> None:
    check_vocabulary(header_of(tmp_path, {}))
    check_vocabulary(header_of(tmp_path, {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<s>", *_BYTES]}))
    check_vocabulary(header_of(tmp_path, {"tokenizer.ggml.tokens": ["", "a", ""]}))  # llama.cpp names empty ones


def test_the_same_token_twice(tmp_path: Path) -> None:
    header = header_of(tmp_path, {"tokenizer.ggml.tokens": ["a", "b", "\x1b", "b"]})
    with pytest.raises(BadModelError, match=r"tokens 1 and 3 of tokenizer.ggml.tokens are both b'b'"):
        check_vocabulary(header)


def test_a_crash_is_explained_by_the_file_or_not_at_all(tmp_path: Path) -> None:
    reason = cause_of_crash(header_of(tmp_path, {"tokenizer.ggml.tokens": ["a", "a"]}).path)
    assert reason is not None
    assert "tokens 0 and 1" in reason.why
    assert cause_of_crash(header_of(tmp_path, {}).path) is None
    assert cause_of_crash(tmp_path / "gone.gguf") is None


def test_tokens_that_differ_in_broken_bytes_only(tmp_path: Path) -> None:
    check_vocabulary(header_of(tmp_path, {"tokenizer.ggml.tokens": [b"\xff", b"\xfe"]}))


def test_token_with_the_name_of_an_empty_one(tmp_path: Path) -> None:
    header = header_of(tmp_path, {"tokenizer.ggml.tokens": ["", "", "[EMPTY_0]"]})
    with pytest.raises(BadModelError, match="tokens 0 and 2"):
        check_vocabulary(header)


def test_sentencepiece_without_byte_tokens(tmp_path: Path) -> None:
    tokens = ["<s>", *_BYTES]
    tokens.remove("<0x0A>")
    header = header_of(tmp_path, {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens})
    with pytest.raises(BadModelError, match="lacks 1 byte tokens, the first is '<0x0A>'"):
        check_vocabulary(header)


def test_byte_token_under_a_tokenizer_without(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.token_type": [1, 6, *[1] * 14]}
    with pytest.raises(BadModelError, match="of token 1 is 6"):
        check_vocabulary(header_of(tmp_path, changes))


def test_vocabulary_of_numbers(tmp_path: Path) -> None:
    with pytest.raises(BadModelError, match="holds no texts"):
        check_vocabulary(header_of(tmp_path, {"tokenizer.ggml.tokens": [1, 2]}))


def test_checks_are_cheap(tmp_path: Path) -> None:
    header = header_of(tmp_path, {"tokenizer.ggml.tokens": [f"token {n}" for n in range(50_000)]})
    assert loops(lambda: (check(header), check_crashes(header), check_vocabulary(header))) < 100

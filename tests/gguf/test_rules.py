"""Every rule: the smallest change that breaks it is found, and the message names field and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.broken_headers import BROKEN, other
from support.effort import loops
from support.gguf_writer import TENSORS, TensorSpec, gguf, tiny_model, write

from llmrun.errors import BadModelError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import cause_of_crash, check, check_vocabulary


def header_of(folder: Path, changes: dict[str, Any], tensors: tuple[TensorSpec, ...] = TENSORS) -> Header:
    return read_header(write(folder / "tiny.gguf", tiny_model(changes, tensors)))


@pytest.mark.parametrize("name", BROKEN)
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


def test_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(BadModelError, match="no tensors"):
        check(header_of(tmp_path, {}, ()))


def test_good_headers_pass(tmp_path: Path) -> None:
    check(header_of(tmp_path, {}))
    check(header_of(tmp_path, other("kimi-linear", rope__dimension_count=0)))


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
    assert loops(lambda: (check(header), check_vocabulary(header))) < 100

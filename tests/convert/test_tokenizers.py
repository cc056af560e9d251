"""Tokens of converted vocabularies against those of Hugging Face's tokenizers, for random strings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from support.hf_writer import bert as bert_weights
from support.hf_writer import byte_level, files_of, llama_like, safetensors, word_piece, write

from llmrun import _native
from llmrun.convert.job import convert_folder
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import UsageError

N_STRINGS = 300
# Composed, decomposed, spacing marks, Chinese, capitals, a sigma that ends a word, marks without a base.
CHARACTERS = [
    *"aBh eto.,!?-\n", "  ", "caf\u00e9", "e\u0301", "\u00c5", "A\u030a", "\uac00", "\ub098", "\uacf5", "\u1100\u1161",
    "\u0bca", "\u0b95\u0bca", "\u0995\u09cb", "\u4e2d\u6587", "\u03a3", "\u03a3\u03a3 ", "\u0130", "\u00df", "\u0301",
    "\U0001f600", "x" * 101, "\u00e9" * 100, "\u00e9" * 101, "model", "runs", "hello", "(", "\u3002", "1",
]  # fmt: skip


def strings(texts: list[str]) -> list[str]:
    chosen = random.Random(38)
    return ["".join(chosen.choices([*CHARACTERS, *texts], k=chosen.randint(1, 12))) for _ in range(N_STRINGS)]


def flagged(tokenizer: dict[str, Any], **texts: dict[str, bool]) -> dict[str, Any]:
    """Append added tokens with these flags to a tokenizer.json."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    first = max(row["id"] for row in tokenizer["added_tokens"]) + 1
    for number, (text, flags) in enumerate(texts.items(), first):
        tokenizer["added_tokens"].append({"id": number, "content": text, **plain, **flags})
    return tokenizer


def bert(*, lowercase: bool, strip_accents: bool | None = None) -> dict[str, Any]:
    tokenizer: dict[str, Any] = word_piece()
    texts = list(tokenizer["model"]["vocab"])
    known = dict.fromkeys(c for text in CHARACTERS for form in (text, text.lower()) for c in form if not c.isspace())
    known |= dict.fromkeys("\u1100\u1161\u1102\u1169\u11bc\u0bc6\u0bbe\u09c7\u09be\u03c3\u03c2" + "aAei")
    texts += [each for c in known for each in (c, "##" + c) if each not in texts]
    tokenizer["model"]["vocab"] = {text: number for number, text in enumerate(texts)}
    tokenizer["normalizer"] |= {"lowercase": lowercase, "strip_accents": strip_accents}
    return tokenizer


FLAGS = {
    "<mask>": {"lstrip": True, "special": True}, "<|assistant|>": {"rstrip": True, "special": True},
    "tool": {"single_word": True}, "<both>": {"lstrip": True, "rstrip": True},
}  # fmt: skip
KINDS = {
    "byte-level, NFC": byte_level(),
    "byte-level, not normalized": byte_level() | {"normalizer": None},
    "byte-level, flags": flagged(byte_level(), **FLAGS),
    "BERT, uncased": bert(lowercase=True),
    "BERT, cased": bert(lowercase=False),
    "BERT, uncased with accents": bert(lowercase=True, strip_accents=False),
    "BERT, cased without accents": bert(lowercase=False, strip_accents=True),
}


def converted(place: Path, tokenizer: dict[str, Any]) -> Path:
    """Convert a model with this tokenizer, and as many rows as that needs."""
    is_bert = tokenizer["model"].get("unk_token") == "[UNK]"
    n_rows = 1 + max(*tokenizer["model"]["vocab"].values(), *(row["id"] for row in tokenizer["added_tokens"]))
    files = files_of("BertModel" if is_bert else "Qwen3ForCausalLM", vocab_size=n_rows)
    weights = bert_weights(n_rows) if is_bert else llama_like(n_rows, head_norms=True)
    files |= {"tokenizer.json": tokenizer, "model.safetensors": safetensors(weights)}
    convert_folder(write(place / "in", files), place / "x.gguf")
    return place / "x.gguf"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_hugging_face(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]
    judge = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
    model = LlamaModel(str(converted(tmp_path, tokenizer)), 0, _native.CancelFlag())
    differences = []
    try:
        for text in strings([row["content"] for row in tokenizer["added_tokens"]]):
            expected = judge.encode(text, add_special_tokens=False).ids
            found = model.vocabulary.tokenize(text, special=True)
            if found != expected:
                differences.append((text, expected, found))
    finally:
        model.close()
    assert differences == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {**bert(lowercase=True)["model"], "max_input_chars_per_word": 50}}, "longest word"),
        ({"normalizer": {**bert(lowercase=True)["normalizer"], "handle_chinese_chars": False}}, "handle_chinese_chars"),
        ({"added_tokens": flagged(word_piece(), tool={"single_word": True})["added_tokens"]}, "single_word"),
    ],
)
def test_rules_that_can_not_be_kept_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        converted(tmp_path, bert(lowercase=True) | change)
    assert said in f"{caught.value.what} {caught.value.why}"

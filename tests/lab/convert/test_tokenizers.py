"""Tokens of converted vocabularies against those of Hugging Face's tokenizers and sentencepiece, for random strings."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from support.hf_writer import bert as bert_weights
from support.hf_writer import byte_level, files_of, llama_like, safetensors, word_piece, write
from support.trained_vocabularies import SAMPLES

from llmrun import _native
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.prompt import token_cache
from llmrun.engine.prompt.template import ControlTexts
from llmrun.engine.prompt.token_cache import TokenCache
from llmrun.errors import UsageError
from llmrun.lab.convert.job import convert_folder

N_STRINGS = 300
# Composed, decomposed, spacing marks, Chinese, capitals, a sigma that ends a word, marks without a base.
CHARACTERS = [
    *"aBh eto.,!?-\n", "  ", "caf\u00e9", "e\u0301", "\u00c5", "A\u030a", "\uac00", "\ub098", "\uacf5", "\u1100\u1161",
    "\u0bca", "\u0b95\u0bca", "\u0995\u09cb", "\u4e2d\u6587", "\u03a3", "\u03a3\u03a3 ", "\u0130", "\u00df", "\u0301",
    "\U0001f600", "x" * 101, "\u00e9" * 100, "\u00e9" * 101, "model", "runs", "hello", "(", "\u3002", "1",
    "\ufb01", "\uff21", "\u00bd", "\u2581", "\t", "   ", " \u00a8", "12345", "it's", "\u00a0", "\u3000",
]  # fmt: skip


def strings(texts: list[str]) -> list[str]:
    chosen = random.Random(38)
    return ["".join(chosen.choices([*CHARACTERS, *texts], k=chosen.randint(1, 12))) for _ in range(N_STRINGS)]


def flagged(tokenizer: dict[str, Any], **texts: dict[str, bool]) -> dict[str, Any]:
    """Append added tokens with these flags to a tokenizer.json."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    first = max(*tokenizer["model"]["vocab"].values(), *(row["id"] for row in tokenizer["added_tokens"])) + 1
    for number, (text, flags) in enumerate(texts.items(), first):
        tokenizer["added_tokens"].append({"id": number, "content": text, **plain, **flags})
    return tokenizer


def bert(*, lowercase: bool, strip_accents: bool | None = None) -> dict[str, Any]:
    tokenizer: dict[str, Any] = word_piece()
    texts = list(tokenizer["model"]["vocab"])
    known = dict.fromkeys(
        c for text in CHARACTERS for form in (text, text.lower()) for c in form if not c.isspace() and c != "\u2581"
    )
    known |= dict.fromkeys("\u1100\u1161\u1102\u1169\u11bc\u0bc6\u0bbe\u09c7\u09be\u03c3\u03c2" + "aAei")
    texts += [each for c in known for each in (c, "##" + c) if each not in texts]
    tokenizer["model"]["vocab"] = {text: number for number, text in enumerate(texts)}
    tokenizer["normalizer"] |= {"lowercase": lowercase, "strip_accents": strip_accents}
    return tokenizer


def byte_pairs(pre_tokenizer: Any = None, **changes: Any) -> dict[str, Any]:
    """tokenizer.json of byte-level BPE with other rules than Qwen's; `changes` are those of the model."""
    tokenizer = byte_level()
    tokenizer["model"] |= changes
    return tokenizer | {"pre_tokenizer": pre_tokenizer or tokenizer["pre_tokenizer"], "normalizer": None}


def split_at(regex: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, whole]}


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LEGACY = [
    {"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
]  # fmt: skip


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}


def byte_fallback(normalizers: list[Any], pre_tokenizer: Any = None) -> dict[str, Any]:
    """tokenizer.json as Llama 2's, with all merges of its tokens, as transformers writes them."""
    words = [
        "\u2581h", "\u2581he", "ll", "hell", "llo", "hello", "\u2581hello", "ru", "run", "\u2581run", "\u2581\u2581",
        "to", "caf",
    ]  # fmt: skip
    letters = [*dict.fromkeys(chain.from_iterable(words)), "a", "B", ".", "\u00e9", "\u4e2d", "1"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys([*words, *letters])]
    return fast_tokenizer(texts, words, normalizers, pre_tokenizer)


def fast_tokenizer(texts: list[str], words: list[str], normalizers: list[Any], pre_tokenizer: Any) -> dict[str, Any]:
    """tokenizer.json of tokens by id, and those of several characters in the order of their merges."""
    vocabulary = {text: number for number, text in enumerate(texts)}
    merges = [
        [word[:cut], word[cut:]]
        for word in words
        for cut in range(1, len(word))
        if word[:cut] in vocabulary and word[cut:] in vocabulary
    ]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": texts[number], **plain, "special": True} for number in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": pre_tokenizer,
        "model": {
            "type": "BPE", "vocab": vocabulary, "merges": merges, "unk_token": "<unk>", "byte_fallback": True,
            "fuse_unk": True,
        },
    }  # fmt: skip


GEMMA = byte_fallback(LEGACY[1:], {
    "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False
})  # fmt: skip
FLAGS = {
    "<mask>": {"lstrip": True, "special": True}, "<|assistant|>": {"rstrip": True, "special": True},
    "tool": {"single_word": True}, "<both>": {"lstrip": True, "rstrip": True}, "TOO": {"normalized": True},
    "<ab>": {}, "b>c": {}, "\u00e9TO": {"normalized": True},
}  # fmt: skip
SCRIPT = [{"type": kind} for kind in ("NFKD", "StripAccents", "Lowercase")]
STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
KINDS = {
    "byte-level, NFC (Qwen)": byte_level(),
    "byte-level, GPT-2": byte_pairs(GPT2),
    "byte-level, Llama 3": byte_pairs(split_at(LLAMA3), ignore_merges=True),
    "byte-level, NFKC": byte_level() | {"normalizer": {"type": "NFKC"}},
    "byte-level, stripped and without accents": byte_level()
    | {"normalizer": {"type": "Sequence", "normalizers": [STRIP, *SCRIPT]}},
    "byte-level, flags": flagged(byte_level(), **FLAGS),
    "byte-level, flags, not normalized": flagged(byte_pairs(), **FLAGS),
    "byte fallback, Llama 2": byte_fallback(LEGACY),
    "byte fallback, Gemma": GEMMA,
    "byte fallback, Metaspace first": byte_fallback([], metaspace("first")),
    "byte fallback, Metaspace always": byte_fallback([], metaspace("always")),
    "byte fallback, Metaspace never": byte_fallback([], metaspace("never")),
    "byte fallback, Llama 2, flags": flagged(byte_fallback(LEGACY), **FLAGS),
    "byte fallback, Metaspace first, flags": flagged(byte_fallback([], metaspace("first")), **FLAGS),
    "byte fallback, Metaspace always, NFKC": byte_fallback([{"type": "NFKC"}], metaspace("always")),
    "BERT, uncased": bert(lowercase=True),
    "BERT, cased": bert(lowercase=False),
    "BERT, uncased with accents": bert(lowercase=True, strip_accents=False),
    "BERT, cased without accents": bert(lowercase=False, strip_accents=True),
}


def converted(place: Path, tokenizer: dict[str, Any]) -> Path:
    """Convert a model with this tokenizer, and as many rows as that needs."""
    is_bert = tokenizer["model"].get("unk_token") == "[UNK]"
    n_rows = 1 + max(*tokenizer["model"]["vocab"].values(), *(row["id"] for row in tokenizer["added_tokens"]))
    if is_bert:
        files = files_of("BertModel", vocab_size=n_rows) | {"model.safetensors": safetensors(bert_weights(n_rows))}
        return _written(place, files | {"tokenizer.json": tokenizer})
    return converted_llama(place, n_rows, **{"tokenizer.json": tokenizer})


def converted_llama(place: Path, n_rows: int, **files: Any) -> Path:
    """Convert a model with these files of a tokenizer."""
    usual = files_of("Qwen3ForCausalLM", vocab_size=n_rows)
    del usual["tokenizer.json"]
    return _written(place, usual | {"model.safetensors": safetensors(llama_like(n_rows, head_norms=True))} | files)


def _written(place: Path, files: dict[str, Any]) -> Path:
    convert_folder(write(place / "in", files), place / "x.gguf")
    return place / "x.gguf"


def differences(
    path: Path, encode: Callable[[str], list[int]], texts: Iterable[str], *, special: bool = True
) -> list[tuple[str, list[int], list[int]]]:
    """Strings with other tokens than those of encode(), and both."""
    model = LlamaModel(str(path), 0, _native.CancelFlag())
    try:
        found = ((text, encode(text), model.vocabulary.tokenize(text, special=special)) for text in texts)
        return [row for row in found if row[1] != row[2]]
    finally:
        model.close()


def encoder(tokenizer: dict[str, Any]) -> Callable[[str], list[int]]:
    judge = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
    return lambda text: list(judge.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_hugging_face(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]
    texts = strings([row["content"] for row in tokenizer["added_tokens"]])
    assert differences(converted(tmp_path, tokenizer), encoder(tokenizer), texts) == []


# ---- SentencePiece


def trained(**options: Any) -> bytes:
    """A tokenizer.model that sentencepiece trained."""
    out = io.BytesIO()
    usual = {"model_type": "bpe", "vocab_size": 700, "byte_fallback": True}
    sentences = [*SAMPLES[:6], "hello model runs caf\u00e9 Tool to"] * 3
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=out, num_threads=1,
        character_coverage=0.98, hard_vocab_limit=False, minloglevel=2, **usual | options,
    )  # fmt: skip
    return out.getvalue()


UNIGRAM = {"model_type": "unigram", "byte_fallback": False, "vocab_size": 300}
OF_USER = {"user_defined_symbols": ["<sep>", "to", "<sep>a", "\u2581\u2581"]}
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
PIECES: dict[str, dict[str, Any]] = {
    "BPE, as Llama 2": PLAIN,
    "BPE, nmt_nfkc, extra spaces removed": {},
    "BPE, nmt_nfkc, extra spaces kept": {"remove_extra_whitespaces": False},
    "BPE, nfkc_cf": {"normalization_rule_name": "nfkc_cf"},
    "BPE, no space in front (Gemma)": {**PLAIN, "add_dummy_prefix": False},
    "BPE, pieces of the user": {**PLAIN, **OF_USER},
    "BPE, pieces of the user, nmt_nfkc": OF_USER,
    "unigram, nmt_nfkc (T5)": UNIGRAM,
    "unigram, nmt_nfkc_cf (ALBERT)": {**UNIGRAM, "normalization_rule_name": "nmt_nfkc_cf"},
    "unigram, identity, extra spaces kept": {**UNIGRAM, **PLAIN},
    "unigram, pieces of the user": {**UNIGRAM, **OF_USER},
}
SLOW = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}


@pytest.mark.parametrize("kind", PIECES)
def test_tokens_are_those_of_sentencepiece(kind: str, tmp_path: Path) -> None:
    data = trained(**PIECES[kind])
    judge = sentencepiece.SentencePieceProcessor(model_proto=data)
    files = {"tokenizer.model": data, "tokenizer_config.json": SLOW}
    path = converted_llama(tmp_path, judge.vocab_size(), **files)
    texts = strings(PIECES[kind].get("user_defined_symbols", []))
    if "unigram" in kind:  # which llama.cpp normalizes once more: that changes a ligature before a mark
        texts = [text.replace("\ufb01\u0301", "\ufb01") for text in texts]
    assert differences(path, judge.encode, texts, special=False) == []


@pytest.mark.parametrize(
    ("normalizers", "pre_tokenizer"),
    [
        ([], metaspace("first")),
        ([], metaspace("never")),
        (LEGACY, None),
        ([{"type": "NFKC"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}], metaspace("always")),
    ],
)
def test_rules_of_tokenizer_json_win_beside_tokenizer_model(
    normalizers: list[Any], pre_tokenizer: Any, tmp_path: Path
) -> None:
    data = trained()
    pieces = sentencepiece.SentencePieceProcessor(model_proto=data)
    texts = [pieces.id_to_piece(number) for number in range(pieces.vocab_size())]
    words = sorted((text for text in texts[259:] if len(text) > 1), key=lambda t: -pieces.get_score(texts.index(t)))
    tokenizer = fast_tokenizer(texts, words, normalizers, pre_tokenizer)
    files = {"tokenizer.model": data, "tokenizer.json": tokenizer, "tokenizer_config.json": SLOW}
    path = converted_llama(tmp_path, len(texts), **files)
    assert differences(path, encoder(tokenizer), strings(["<s>", "</s>"])) == []


def test_parts_of_a_prompt_have_the_tokens_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the beginning gets a space, with segments that are tokenized apart."""
    monkeypatch.setattr(token_cache, "MIN_SEGMENT", 4)
    tokenizer = KINDS["byte fallback, Metaspace first, flags"]
    model = LlamaModel(str(converted(tmp_path, tokenizer)), 0, _native.CancelFlag())
    tokenize = partial(model.vocabulary.tokenize, special=True)
    cache = TokenCache(tokenize, ControlTexts(model.vocabulary.control_texts))
    texts = ["".join(three) for three in zip(*[iter(strings(["<s>", "</s>", "<mask>"] * 10))] * 3, strict=True)]
    cached = [[cache.tokens(text, begins=begins) for begins in (True, False)] for text in texts]
    whole = [[tokenize(text, begins=begins) for begins in (True, False)] for text in texts]
    model.close()
    assert cached == whole
    assert any(first != later for first, later in whole)


@pytest.mark.parametrize(("legacy", "expected"), [(False, ["<s>", "t", "o"]), (True, ["<s>", "\u2581", "t", "o"])])
def test_spaces_in_front_without_tokenizer_json(legacy: bool, expected: list[str], tmp_path: Path) -> None:
    data = trained(user_defined_symbols=["zz"])
    pieces = sentencepiece.SentencePieceProcessor(model_proto=data)
    files = {"tokenizer.model": data, "tokenizer_config.json": SLOW | {"legacy": legacy}}
    path = converted_llama(tmp_path, pieces.vocab_size(), **files)
    model = LlamaModel(str(path), 0, _native.CancelFlag())
    found = model.vocabulary.tokenize("<s>to", special=True)
    begins = model.vocabulary.tokenize("to", special=True)
    continues = model.vocabulary.tokenize("to", special=True, begins=False)
    model.close()
    assert "".join(map(pieces.id_to_piece, found)) == "".join(expected)
    assert pieces.id_to_piece(begins[0]).startswith("\u2581")
    assert pieces.id_to_piece(continues[0]).startswith("\u2581") == legacy


def split_metaspace() -> dict[str, Any]:
    return byte_fallback([], metaspace("first") | {"split": True})


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (split_metaspace(), "'\u2581\u2581'"),
        (byte_fallback([{"type": "Nmt"}], metaspace("first")), "Nmt"),
        (byte_fallback([{"type": "Precompiled", "precompiled_charsmap": ""}], metaspace("first")), "Precompiled"),
        (byte_fallback([], {"type": "Digits", "individual_digits": True}), "Digits"),
        (byte_fallback([]), "does not write spaces"),
        (byte_fallback([{"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}], metaspace("first")), "a+"),
        (byte_pairs(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    ],
)
def test_what_llama_cpp_can_not_do_is_refused_by_name(tokenizer: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        converted(tmp_path, tokenizer)
    assert said in f"{caught.value.what} {caught.value.why}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"byte_fallback": False}, "byte_fallback"),
        ({"model_type": "char"}, "model_type"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({**UNIGRAM, "byte_fallback": True, "vocab_size": 600}, "byte_fallback"),
    ],
)
def test_sentencepiece_models_that_llama_cpp_can_not_do_are_refused(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    data = trained(**options)
    n_rows = sentencepiece.SentencePieceProcessor(model_proto=data).vocab_size()
    with pytest.raises(UsageError) as caught:
        converted_llama(tmp_path, n_rows, **{"tokenizer.model": data, "tokenizer_config.json": SLOW})
    assert said in f"{caught.value.what} {caught.value.why}"


def test_tokens_that_llama_cpp_merges_on_its_own_are_named(tmp_path: Path) -> None:
    tokenizer = byte_fallback(LEGACY)
    tokenizer["model"]["merges"].remove(["hell", "o"])
    n_rows = len(tokenizer["model"]["vocab"])
    usual = files_of("Qwen3ForCausalLM", vocab_size=n_rows)
    usual |= {"model.safetensors": safetensors(llama_like(n_rows, head_norms=True)), "tokenizer.json": tokenizer}
    notes = convert_folder(write(tmp_path / "in", usual), tmp_path / "x.gguf").notes
    assert any("merges what is a token" in note for note in notes)


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

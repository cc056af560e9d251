"""A long text has the same tokens in pieces as in one, with every kind of tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.trained_vocabularies import byte_pairs, sentence_piece, strings, word_piece

from llmrun import _native
from llmrun.engine.llama import cuts, vocabulary
from llmrun.engine.llama.cuts import Cuts
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.llama.vocabulary import LlamaVocabulary
from llmrun.errors import UsageError

# The pre-tokenizers that differ most; superbpe and exaone-moe let tokens span words.
PRE = (
    "gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-llm", "deepseek-v3", "deepseek-coder", "default",
    "falcon", "bloom", "smollm", "chameleon", "kimi-k2", "tiny_aya", "afmoe", "jais-2", "youtu", "superbpe",
    "exaone-moe",
)  # fmt: skip
NASTY = (
    "a", "b", " ", "\n", "。", "，", "1", "12", "!", "/", ".", "=", "é", "敏", "ab", "  ", "\n\n", "\t", "'s", "\r\n",
    "\u2581", "<s>", "</s>", "🙂", "-", "x y", "\u0301", "\u200b", "\x00", "的。", "The", "123456",
)  # fmt: skip


def opened(path: Path) -> LlamaVocabulary:
    return LlamaModel(str(path), 0, _native.CancelFlag(), vocabulary_only=True).vocabulary


def texts() -> list[str]:
    rng = random.Random(7)
    sentences = [" ".join(strings(6, seed)) for seed in range(10)]
    return [*sentences, *("".join(rng.choices(NASTY, k=rng.randint(2, 40))) for _ in range(100))]


def assert_pieces_are_exact(found: LlamaVocabulary, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compare with the tokens of whole texts; return the number of cuts."""
    n_cuts = 0
    for text in texts():
        for special in (True, False):
            whole = found.tokenize(text, special=special)
            for module in (cuts, vocabulary):
                monkeypatch.setattr(module, "PIECE_CHARACTERS", 1)
            assert found.tokenize(text, special=special) == whole, text
            n_cuts += len(list(found._cuts.pieces(text))) - 1 if found._cuts is not None else 0
            monkeypatch.undo()
    return n_cuts


@pytest.mark.parametrize("pre", PRE)
def test_byte_pairs(pre: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert assert_pieces_are_exact(opened(byte_pairs(tmp_path, pre)[1]), monkeypatch) > 500


@pytest.mark.parametrize("pre", ["superbpe", "exaone-moe", "gpt-2"])
def test_byte_pairs_whose_tokens_span_words(pre: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert assert_pieces_are_exact(opened(byte_pairs(tmp_path, pre, splits=False)[1]), monkeypatch) > 50


@pytest.mark.parametrize("train", [sentence_piece, word_piece])
def test_other_kinds(
    train: Callable[[Path], tuple[object, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert assert_pieces_are_exact(opened(train(tmp_path)[1]), monkeypatch) > 250


def test_a_token_that_spans_a_place_forbids_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "PIECE_CHARACTERS", 1)

    def pieces(text: str, *tokens: str, special: tuple[str, ...] = (), drops_space: bool = False) -> list[str]:
        found = Cuts([token.encode("utf-8", "surrogateescape") for token in tokens], special, drops_space=drops_space)
        return list(found.pieces(text))

    assert pieces("ab cd\nef的。gh") == ["ab", " cd\n", "ef的", "。gh"]
    assert pieces("ab cd", "b ") == pieces("ab cd", "xb cx") == ["ab cd"]
    assert pieces("ab cd", " cd", "a ") == ["ab", " cd"]
    assert pieces("a\nb", "\nb") == ["a\nb"]
    for text in ("a\n/b", "a\n\nb", "a  b", "a\u2581 b", "a \u2581b"):
        assert pieces(text) == [text]
    assert pieces("aé cd", "\udca9 ") == ["aé cd"], "a token that ends or begins inside a character"
    assert pieces("a> <b", special=("<x>",)) == ["a> <b"], "it may strip the space"
    assert pieces("ab cd\nef", drops_space=True) == ["ab", "cd\nef"]


def test_a_long_word_needs_no_large_stack(tmp_path: Path) -> None:
    """The pattern of tekken is matched by std::regex, which calls itself for each character."""
    found = opened(byte_pairs(tmp_path, "tekken")[1])
    for text in ("=" * 200_000, "a" * 200_000, " " * 200_000):
        pieces = found.token_pieces(text, special=False)
        assert b"".join(found.piece(token) for tokens in pieces for token in tokens).decode() == text


def test_a_text_that_can_not_be_cut_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_MOST_CHARACTERS", 100_000)
    found = opened(byte_pairs(tmp_path)[1])
    assert len(found.tokenize("a " * 200_000, special=False)) == 400_000
    with pytest.raises(UsageError, match="a part of 150,000 characters has no space"):
        found.tokenize("a" * 150_000, special=False)

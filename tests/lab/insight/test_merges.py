"""Merge trees: each rule against Hugging Face's tokenizers, and against textbook merging of whole words."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path

import pytest
from support.gguf_writer import gguf, write
from support.trained_vocabularies import byte_pairs, sentence_piece, strings, word_piece
from tokenizers import Tokenizer

from llmrun import _native
from llmrun.engine.llama.model import LlamaModel
from llmrun.lab.insight.merges import MergeNode, MergeRule, merge_rule

Make = Callable[[Path], tuple[Tokenizer, Path]]


def is_plain(text: str) -> bool:
    """Return whether llama.cpp normalizes a text as BERT does: unlike BERT it drops some marks and Korean letters."""
    letters = unicodedata.normalize("NFD", text)
    return not any(unicodedata.category(each) == "Mc" or "HANGUL" in unicodedata.name(each, "") for each in letters)


@pytest.mark.parametrize(("make", "wanted"), [(byte_pairs, None), (sentence_piece, None), (word_piece, is_plain)])
def test_5000_strings_have_the_tokens_that_tokenizers_gives_and_their_trees_lead_to_them(
    tmp_path: Path, make: Make, wanted: Callable[[str], bool] | None
) -> None:
    tokenizer, path = make(tmp_path)
    vocabulary = LlamaModel(str(path), 0, _native.CancelFlag(), vocabulary_only=True).vocabulary
    rule = merge_rule(path)
    assert rule is not None
    texts = list(islice(filter(wanted, strings(10_000, seed=7)), 5000))
    for number, text in enumerate(texts):
        tokens = vocabulary.tokenize(text, special=False)
        assert tokens == tokenizer.encode(text, add_special_tokens=False).ids, text
        for made, node in with_trees(rule, tokens) if number < 300 else ():
            # No rule joined a byte that is spelled as such, nor what stands for the unknown.
            is_whole = node is None and all(is_special(vocabulary.control_piece(token)) for token in made)
            assert is_whole or (node and node.data == b"".join(map(vocabulary.piece, made)) and is_joined(node)), text


def with_trees(rule: MergeRule, tokens: list[int]) -> Iterator[tuple[list[int], MergeNode | None]]:
    """Each tree, and the tokens it is of."""
    rest = iter(tokens)
    for count, node in rule.origins(tokens):
        yield list(islice(rest, count)), node
    assert not list(rest)


def is_joined(node: MergeNode) -> bool:
    return not node.parts or (
        b"".join(part.data for part in node.parts) == node.data and all(map(is_joined, node.parts))
    )


def is_special(piece: bytes) -> bool:
    """Bytes that are spelled one by one, and what stands for the unknown."""
    return len(piece) == 1 or piece == b"[UNK]"


def textbook(word: str, ranks: dict[tuple[str, str], int]) -> list[object]:
    """Byte pair encoding of a whole word: nested pairs of letters."""
    parts: list[tuple[str, object]] = [(letter, letter) for letter in word]
    while True:
        found = [(ranks[a[0], b[0]], at) for at, (a, b) in enumerate(pairwise(parts)) if (a[0], b[0]) in ranks]
        if not found:
            return [tree for _, tree in parts]
        _, at = min(found)
        (left, one), (right, other) = parts[at : at + 2]
        parts[at : at + 2] = [(left + right, (one, other))]


def nested(node: MergeNode) -> object:
    return (nested(node.parts[0]), nested(node.parts[1])) if node.parts else node.data


def test_a_tokens_own_tree_is_the_one_it_has_in_its_word(tmp_path: Path) -> None:
    tokenizer, path = byte_pairs(tmp_path)
    model = json.loads(tokenizer.to_str())["model"]
    ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}
    letters = {letter: bytes([byte]) for letter, byte in byte_letters(tokenizer).items()}
    rule = merge_rule(path)
    assert rule is not None
    n_trees = 0
    for text in strings(300, seed=3):
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
            ids = [token.id for token in tokenizer.model.tokenize(word)]
            expected = [in_bytes(tree, letters) for tree in textbook(word, ranks)]
            assert [origin.node and nested(origin.node) for origin in rule.origins(ids)] == expected
            n_trees += len(ids)
    assert n_trees > 1000


def byte_letters(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokenizer's own letter of each byte that occurs in UTF-8."""
    found = {}
    for text in map(chr, (*range(0x80), *range(0x80, 0x3000, 7), *range(0x3000, 0x110000, 4099))):
        if not 0xD800 <= ord(text) < 0xE000:
            word = "".join(part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
            found.update(zip(word, text.encode(), strict=True))
    return found


def in_bytes(tree: object, letters: dict[str, bytes]) -> object:
    return tuple(in_bytes(part, letters) for part in tree) if isinstance(tree, tuple) else letters[str(tree)]


def file_with(folder: Path, kind: str, words: list[str], **more: object) -> Path:
    keys = {f"tokenizer.ggml.{name}": value for name, value in more.items()}
    tokens = {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": words}
    return write(folder / "tiny.gguf", gguf({"general.architecture": "llama", **tokens, **keys}))


def rule_of(*arguments: object, **more: object) -> MergeRule:
    found = merge_rule(file_with(*arguments, **more))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_the_leftmost_of_equal_unions_comes_first(tmp_path: Path) -> None:
    rule = rule_of(tmp_path, "llama", ["a", "aa", "aaa"], scores=[0.0, -1.0, -2.0])
    ((_, node),) = rule.origins([2])
    assert node == MergeNode(
        b"aaa", -2.0, (MergeNode(b"aa", -1.0, (MergeNode(b"a"), MergeNode(b"a"))), MergeNode(b"a"))
    )


def test_a_token_that_merges_dont_lead_to_has_no_tree(tmp_path: Path) -> None:
    rule = rule_of(tmp_path, "gpt2", ["a", "b", "c", "abc"], merges=["a b"])
    assert [origin.node for origin in rule.origins([3, 0])] == [None, MergeNode(b"a")]


def test_word_piece_says_how_many_longer_pieces_it_looked_for(tmp_path: Path) -> None:
    rule = rule_of(
        tmp_path, "bert", ["[UNK]", "\u2581un", "able", "\u2581a", "\u2581unhappy"], token_type=[3, 1, 1, 1, 1]
    )
    (first, second, third) = rule.origins([1, 2, 3, 0])
    assert first.n_tokens == 2
    assert first.node == MergeNode(b" unable", None, (MergeNode(b" un", 4.0), MergeNode(b"able", 0.0)))
    assert (second.node, third.node) == (MergeNode(b" a", 0.0), None)
    assert [origin.node for origin in rule.origins([1, 1, 0])] == [MergeNode(b" un", 0.0), MergeNode(b" un", 0.0), None]


def test_unigram_shows_what_a_piece_was_preferred_to(tmp_path: Path) -> None:
    rule = rule_of(tmp_path, "t5", ["ab", "a", "b", "abb"], scores=[-3.0, -2.0, -2.5, -9.0])
    best, beaten = rule.origins([0, 3])
    assert best.node == MergeNode(b"ab", -3.0, (MergeNode(b"a", -2.0), MergeNode(b"b", -2.5)))
    assert beaten.node is None, "ab and b are likelier together: Viterbi's algorithm never chose it"


def test_other_kinds_have_no_rule(tmp_path: Path) -> None:
    assert merge_rule(file_with(tmp_path, "rwkv", ["a"])) is None
    assert merge_rule(file_with(tmp_path, "gpt2", ["a"])) is None, "no merges"

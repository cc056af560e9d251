"""Merge trees of tokens: the tokenizers' algorithms, applied to the vocabulary in a model's header.

The algorithms are llama.cpp's (src/llama-vocab.cpp) without the optimizations: for a few tokens at a time.
llama.cpp tokenizes; a token that these algorithms do not lead to has no tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from llmrun.gguf.reader import read_header

_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
_SCORES, _KINDS = "tokenizer.ggml.scores", "tokenizer.ggml.token_type"
_NORMAL = 1  # llama_token_type: neither a control token, nor added by hand, nor a single byte
_SPACE = "\u2581".encode()  # what vocabularies write for a space


@dataclass(frozen=True, slots=True)
class MergeNode:
    """A node of a token's merge tree; the token itself is the root."""

    data: bytes  # UTF-8, maybe of incomplete characters
    value: float | None = None  # rank or score, see MergeRule.words; None without one
    parts: tuple[MergeNode, ...] = ()  # see MergeRule.words; none of a leaf


class TokenOrigin(NamedTuple):
    """The tree of the next tokens of a text, mostly one; node is None for tokens that no rule made."""

    n_tokens: int
    node: MergeNode | None


class MergeRule(Protocol):
    """A tokenizer's algorithm with a vocabulary."""

    name: ClassVar[str]
    words: ClassVar[str]  # explanation of the algorithm and of its trees, for users
    value_name: ClassVar[str]  # of the number of a node

    def origins(self, tokens: Sequence[int]) -> Iterator[TokenOrigin]:
        """Yield the merge trees of a text's tokens, in order."""


def merge_rule(path: Path) -> MergeRule | None:
    """Return the rule of a model's vocabulary; None if its kind has no trees.

    Raises:
        BadModelError: the header is damaged.
    """
    header = read_header(path, arrays=(_TOKENS, _MERGES, _SCORES, _KINDS))
    texts, merges, scores = (_array(header.metadata, key) for key in (_TOKENS, _MERGES, _SCORES))
    kinds = _array(header.metadata, _KINDS) or (_NORMAL,) * len(texts)
    words = [text if kind == _NORMAL else None for text, kind in zip(texts, kinds, strict=False)]
    model = header.tokenizer_model
    if model in ("gpt2", "gemma4") and merges:
        return BytePairs(words, merges, is_byte_level=model == "gpt2")
    if model == "llama" and scores:
        return SentencePiece(words, scores)
    if model == "t5" and scores:
        return Unigram(words, scores)
    return WordPiece(words) if model == "bert" else None


def _array(metadata: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    value = metadata.get(key)
    return value if isinstance(value, tuple) else ()


class BytePairs:
    """Byte pair encoding, of GPT-2 and most models since."""

    name: ClassVar[str] = "BPE"
    value_name: ClassVar[str] = "rank"
    words: ClassVar[str] = (
        "Byte pair encoding starts from single bytes or characters and repeatedly merges the two neighbours that are "
        "first in the model's list of merges. Below a token are the two parts it was merged from, with the "
        "merge's rank in that list, where frequent ones come first."
    )

    def __init__(self, words: Sequence[bytes | None], merges: Sequence[bytes], *, is_byte_level: bool) -> None:
        self._words = words
        self._ranks = {merge: rank for rank, merge in enumerate(merges)}
        self._is_byte_level = is_byte_level

    def origins(self, tokens: Sequence[int]) -> Iterator[TokenOrigin]:
        """Yield a tree for each token: no merge crosses a token's end, so its own characters suffice."""
        for token in tokens:
            root = _merged(self._words[token], self._rank)
            yield TokenOrigin(1, root and _readable(root, self._bytes))

    def _rank(self, left: bytes, right: bytes) -> float | None:
        return self._ranks.get(left + b" " + right)

    def _bytes(self, text: bytes) -> bytes:
        if not self._is_byte_level:
            return text.replace(_SPACE, b" ")
        return bytes(_BYTE_OF.get(letter, 0x3F) for letter in text.decode("utf-8", "replace"))


class SentencePiece:
    """SentencePiece's own byte pair encoding, of Llama 2, Mistral, Gemma and others."""

    name: ClassVar[str] = "SentencePiece"
    value_name: ClassVar[str] = "score"
    words: ClassVar[str] = (
        "SentencePiece's BPE starts from single characters and repeatedly merges the two neighbours whose union has "
        "the highest score in the vocabulary. Below a token are the two parts it was merged from, with that "
        "score. A character that the vocabulary lacks is spelled in byte tokens."
    )

    def __init__(self, words: Sequence[bytes | None], scores: Sequence[float]) -> None:
        self._words = words
        self._scores = {word: score for word, score in zip(words, scores, strict=False) if word is not None}

    def origins(self, tokens: Sequence[int]) -> Iterator[TokenOrigin]:
        """Yield a tree for each token: no merge crosses a token's end, so its own characters suffice."""
        for token in tokens:
            root = _merged(self._words[token], self._rank)
            yield TokenOrigin(1, root and _readable(root, _spaced, sign=-1))

    def _rank(self, left: bytes, right: bytes) -> float | None:
        score = self._scores.get(left + right)
        return None if score is None else -score


class WordPiece:
    """WordPiece, of BERT."""

    name: ClassVar[str] = "WordPiece"
    value_name: ClassVar[str] = "tried"
    words: ClassVar[str] = (
        "WordPiece takes the longest beginning of a word that is in the vocabulary, then the longest beginning of the "
        "rest, with the number of longer beginnings that were tried first."
    )

    def __init__(self, words: Sequence[bytes | None]) -> None:
        self._words = words
        self._known = {word for word in words if word}
        self._longest = max(map(len, self._known), default=0)

    def origins(self, tokens: Sequence[int]) -> Iterator[TokenOrigin]:
        """Yield a tree for each word; a token that begins a word has a leading space."""
        start = 0
        while start < len(tokens):
            end = start + 1
            while end < len(tokens) and (self._words[tokens[end]] or _SPACE)[: len(_SPACE)] != _SPACE:
                end += 1
            pieces = [self._words[token] for token in tokens[start:end]]
            yield TokenOrigin(end - start, self._word(pieces))
            start = end

    def _word(self, pieces: Sequence[bytes | None]) -> MergeNode | None:
        if None in pieces:
            return None
        rest = word = b"".join(piece for piece in pieces if piece)
        nodes: list[MergeNode] = []
        for piece in pieces:
            letters = [len(rest[:end].decode("utf-8", "ignore").encode()) for end in range(1, len(rest) + 1)]
            lengths = sorted({end for end in letters if 0 < end <= self._longest}, reverse=True)
            taken = next((end for end in lengths if rest[:end] in self._known), 0)
            if rest[:taken] != piece:
                return None
            nodes.append(MergeNode(_spaced(rest[:taken]), sum(end > taken for end in lengths)))
            rest = rest[taken:]
        return MergeNode(_spaced(word), None, tuple(nodes)) if len(nodes) > 1 else nodes[0]


class Unigram:
    """SentencePiece's unigram model, of T5 and others."""

    name: ClassVar[str] = "Unigram"
    value_name: ClassVar[str] = "score"
    words: ClassVar[str] = (
        "The unigram model cuts a text so that the scores of its pieces, logarithms of how likely they are, have the "
        "highest sum; Viterbi's algorithm finds that cut. Beside a piece is its score, below it the best cut without "
        "it."
    )

    def __init__(self, words: Sequence[bytes | None], scores: Sequence[float]) -> None:
        self._words = words
        self._scores = {word: score for word, score in zip(words, scores, strict=False) if word}

    def origins(self, tokens: Sequence[int]) -> Iterator[TokenOrigin]:
        """Yield a tree for each token; none for a token whose text has a better cut."""
        for token in tokens:
            word = self._words[token]
            score = self._scores.get(word or b"")
            if not word or score is None:
                yield TokenOrigin(1, None)
                continue
            other = self._best_cut(word)
            is_best = sum(part.value or 0.0 for part in other) <= score if other else True
            yield TokenOrigin(1, MergeNode(_spaced(word), score, other) if is_best else None)

    def _best_cut(self, word: bytes) -> tuple[MergeNode, ...]:
        """Return the cut of a word into two or more pieces with the highest sum of scores; () if there is none."""
        best: list[tuple[float, tuple[MergeNode, ...]] | None] = [(0.0, ())]
        for end in range(1, len(word) + 1):
            cuts = []
            for start in range(end):
                before, score = best[start], self._scores.get(word[start:end])
                if before is not None and score is not None and end - start < len(word):
                    piece = MergeNode(_spaced(word[start:end]), score)
                    cuts.append((before[0] + score, (*before[1], piece)))
            best.append(max(cuts, key=lambda cut: cut[0], default=None))
        return best[-1][1] if best[-1] else ()


def _merged(word: bytes | None, rank: Callable[[bytes, bytes], float | None]) -> MergeNode | None:
    """Return a word merged from its characters, the leftmost neighbours of the lowest rank first.

    None without a word, and if the merges don't lead to one piece.
    """
    parts = [MergeNode(letter.encode()) for letter in (word or b"").decode("utf-8", "replace")]
    while len(parts) > 1:
        ranks = [(rank(left.data, right.data), at) for at, (left, right) in enumerate(pairwise(parts))]
        value, at = min(((value, at) for value, at in ranks if value is not None), default=(None, 0))
        if value is None:
            return None
        left, right = parts[at : at + 2]
        parts[at : at + 2] = [MergeNode(left.data + right.data, value, (left, right))]
    return parts[0] if parts else None


def _readable(node: MergeNode, text: Callable[[bytes], bytes], sign: int = 1) -> MergeNode:
    """Return a tree with text instead of the vocabulary's spelling."""
    parts = tuple(_readable(part, text, sign) for part in node.parts)
    return replace(node, data=text(node.data), value=None if node.value is None else sign * node.value, parts=parts)


def _spaced(text: bytes) -> bytes:
    return text.replace(_SPACE, b" ")


def _byte_letters() -> dict[str, int]:
    """Return GPT-2's letters of bytes: printable ones of Latin-1 are their own, others count from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_letters()

"""How tokens came to be: the tokenizers' own rules, applied to the vocabulary that a model's header carries.

Owns the rules, which are llama.cpp's (src/llama-vocab.cpp) without their speed: for a few tokens at a time. Which
tokens a text has is llama.cpp's to say; where these rules lead to other ones, nothing is said of how they came.
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
    """A piece of text on its way to a token, or the token itself.

    Attributes:
        data: UTF-8 bytes, maybe not whole characters.
        value: what the rule went by, see its words; None where it went by nothing.
        parts: see the rule's words; none of what was there from the start.
    """

    data: bytes
    value: float | None = None
    parts: tuple[MergeNode, ...] = ()


class TokenOrigin(NamedTuple):
    """How the next tokens of a text came: mostly one. node is None where no rule made them."""

    n_tokens: int
    node: MergeNode | None


class MergeRule(Protocol):
    """A kind of tokenizer, with the vocabulary it works on.

    Attributes:
        name: that people know it by.
        words: what it does, and how its trees are read.
    """

    name: ClassVar[str]
    words: ClassVar[str]

    def origins(self, tokens: Sequence[int]) -> Iterator[TokenOrigin]:
        """How each token of a text came."""


def merge_rule(path: Path) -> MergeRule | None:
    """The rule of a model's vocabulary; None where it is one that has no trees.

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
    found = metadata.get(key)
    return found if isinstance(found, tuple) else ()


class BytePairs:
    """Byte pair encoding, of GPT-2 and most models since."""

    name: ClassVar[str] = "BPE"
    words: ClassVar[str] = (
        "Byte pair encoding starts from single bytes or characters and joins the two neighbours that stand first in "
        "the model's list of merges, again and again. Below a token stands what it was joined from; the number is the "
        "merge's place in that list, where frequent ones come first."
    )

    def __init__(self, words: Sequence[bytes | None], merges: Sequence[bytes], *, is_byte_level: bool) -> None:
        self._words = words
        self._ranks = {merge: rank for rank, merge in enumerate(merges)}
        self._is_byte_level = is_byte_level

    def origins(self, tokens: Sequence[int]) -> Iterator[TokenOrigin]:
        """See MergeRule. No merge crosses the end of a token, so that each one's own letters give its tree."""
        for token in tokens:
            made = _joined(self._words[token], self._rank)
            yield TokenOrigin(1, made and _translated(made, self._bytes))

    def _rank(self, left: bytes, right: bytes) -> float | None:
        return self._ranks.get(left + b" " + right)

    def _bytes(self, text: bytes) -> bytes:
        if not self._is_byte_level:
            return text.replace(_SPACE, b" ")
        return bytes(_BYTE_OF.get(letter, 0x3F) for letter in text.decode("utf-8", "replace"))


class SentencePiece:
    """SentencePiece's own byte pair encoding, of Llama 2, Mistral, Gemma and others."""

    name: ClassVar[str] = "SentencePiece"
    words: ClassVar[str] = (
        "SentencePiece's BPE starts from single characters and joins the two neighbours whose union has the highest "
        "score in the vocabulary, again and again. Below a token stands what it was joined from; the number is that "
        "score. A character that the vocabulary lacks is spelled in byte tokens."
    )

    def __init__(self, words: Sequence[bytes | None], scores: Sequence[float]) -> None:
        self._words = words
        self._scores = {word: score for word, score in zip(words, scores, strict=False) if word is not None}

    def origins(self, tokens: Sequence[int]) -> Iterator[TokenOrigin]:
        """See MergeRule. No union crosses the end of a token, so that each one's own characters give its tree."""
        for token in tokens:
            made = _joined(self._words[token], self._rank)
            yield TokenOrigin(1, made and _translated(made, _spaced, sign=-1))

    def _rank(self, left: bytes, right: bytes) -> float | None:
        score = self._scores.get(left + right)
        return None if score is None else -score


class WordPiece:
    """WordPiece, of BERT."""

    name: ClassVar[str] = "WordPiece"
    words: ClassVar[str] = (
        "WordPiece takes the longest beginning of a word that is in the vocabulary, then the longest beginning of the "
        "rest. The number says how many longer ones were looked for in vain."
    )

    def __init__(self, words: Sequence[bytes | None]) -> None:
        self._words = words
        self._known = {word for word in words if word}
        self._longest = max(map(len, self._known), default=0)

    def origins(self, tokens: Sequence[int]) -> Iterator[TokenOrigin]:
        """See MergeRule. A word's tokens have one tree; a token that begins a word has a space in front."""
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
        found: list[MergeNode] = []
        for piece in pieces:
            letters = [len(rest[:end].decode("utf-8", "ignore").encode()) for end in range(1, len(rest) + 1)]
            tried = sorted({end for end in letters if 0 < end <= self._longest}, reverse=True)
            taken = next((end for end in tried if rest[:end] in self._known), 0)
            if rest[:taken] != piece:
                return None
            found.append(MergeNode(_spaced(rest[:taken]), sum(end > taken for end in tried)))
            rest = rest[taken:]
        return MergeNode(_spaced(word), None, tuple(found)) if len(found) > 1 else found[0]


class Unigram:
    """SentencePiece's unigram model, of T5 and others."""

    name: ClassVar[str] = "Unigram"
    words: ClassVar[str] = (
        "The unigram model cuts a text so that the scores of its pieces, logarithms of how likely they are, have the "
        "highest sum; Viterbi's algorithm finds that cut. The number is a piece's score. Below stands the best cut "
        "without it."
    )

    def __init__(self, words: Sequence[bytes | None], scores: Sequence[float]) -> None:
        self._words = words
        self._scores = {word: score for word, score in zip(words, scores, strict=False) if word}

    def origins(self, tokens: Sequence[int]) -> Iterator[TokenOrigin]:
        """See MergeRule."""
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
        """The pieces with the highest sum of scores that a word can be cut into, without itself; none if it can't."""
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


def _joined(word: bytes | None, rank: Callable[[bytes, bytes], float | None]) -> MergeNode | None:
    """A word, joined from its characters: the neighbours of lowest rank first, the left ones of equals.

    None for no word, and where it does not become one piece.
    """
    parts = [MergeNode(letter.encode()) for letter in (word or b"").decode("utf-8", "replace")]
    while len(parts) > 1:
        found = [(rank(left.data, right.data), at) for at, (left, right) in enumerate(pairwise(parts))]
        value, at = min(((value, at) for value, at in found if value is not None), default=(None, 0))
        if value is None:
            return None
        left, right = parts[at : at + 2]
        parts[at : at + 2] = [MergeNode(left.data + right.data, value, (left, right))]
    return parts[0] if parts else None


def _translated(node: MergeNode, text: Callable[[bytes], bytes], sign: int = 1) -> MergeNode:
    """A tree in people's letters."""
    parts = tuple(_translated(part, text, sign) for part in node.parts)
    return replace(node, data=text(node.data), value=None if node.value is None else sign * node.value, parts=parts)


def _spaced(text: bytes) -> bytes:
    return text.replace(_SPACE, b" ")


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: itself for a printable one of Latin-1, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_letters()

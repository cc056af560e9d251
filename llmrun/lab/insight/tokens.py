"""The tokens of a text, and their number for each script.

llama.cpp tokenizes, in the engine.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llmrun.protocol.jobs.text import TOKENIZE, TextTokens, TokenizeText
from llmrun.runner import client

_OTHERS = "digits, signs, spaces"
_NAMES = {"CJK": "Chinese", _OTHERS: _OTHERS}
# Scripts without spaces between words, and characters that are no words.
_SPACELESS = frozenset({"Chinese", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan", _OTHERS})


class Token(NamedTuple):
    """One token of a text: id, UTF-8 bytes, maybe of incomplete characters; a control token is no text."""

    id: int
    data: bytes
    is_control: bool


class TokenGroup(NamedTuple):
    """Tokens, mostly one, that together are whole characters, and their text."""

    tokens: tuple[Token, ...]
    text: str


@dataclass(frozen=True, slots=True)
class TokenizedFile:
    """A text's tokens in a model's vocabulary of n_vocab tokens."""

    path: Path  # of the model's file
    tokens: tuple[Token, ...]
    n_vocab: int


@dataclass(frozen=True, slots=True)
class ScriptCount:
    """The size of the part of a text that is written in one script."""

    script: str  # e.g. "Latin"; digits, signs and spaces count together
    characters: int
    n_bytes: int
    tokens: int  # a token counts for the script of its first letter
    words: int | None  # None for scripts without spaces between words


def tokenize_text(engine: client.EngineClient, path: Path, text: str, *, special: bool) -> TokenizedFile:
    """Return a text's tokens.

    Args:
        special: see llmrun.protocol.jobs.text.TokenizeText.

    Raises:
        BadModelError: the vocabulary can't be loaded, or can't spell the text.
        EngineCrashedError: the engine died.
    """
    tokens = engine.do(TOKENIZE, TokenizeText(str(path.absolute()), text, special))
    return TokenizedFile(path, as_tokens(tokens), tokens.n_vocab)


def as_tokens(text: TextTokens) -> tuple[Token, ...]:
    """Return the engine's result as one entry for each token of the text."""
    pieces = {piece.token: Token(piece.token, bytes.fromhex(piece.data), piece.is_control) for piece in text.pieces}
    return tuple(pieces[token] for token in text.tokens)


def groups(tokens: Sequence[Token]) -> Iterator[TokenGroup]:
    """Yield tokens, grouped if they share a character. Invalid UTF-8 becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pending: list[Token] = []
    text = ""
    for token in tokens:
        if token.is_control and pending:
            yield TokenGroup(tuple(pending), text + decoder.decode(b"", final=True))
            pending, text = [], ""
        pending.append(token)
        text += decoder.decode(token.data)
        if not decoder.getstate()[0]:
            yield TokenGroup(tuple(pending), text)
            pending, text = [], ""
    if pending:
        yield TokenGroup(tuple(pending), text + decoder.decode(b"", final=True))


def script_counts(tokens: Sequence[Token]) -> list[ScriptCount]:
    """Return the counts of each script, the one with most tokens first, without control tokens."""
    counts: dict[str, _Count] = {}
    script, begins_word = _OTHERS, True  # script of the previous character
    for group in groups([token for token in tokens if not token.is_control]):
        first_script = ""
        for character in group.text:
            script = _script(character) or script
            count = counts.setdefault(script, _Count())
            count.characters += 1
            count.n_bytes += len(character.encode())
            if script != _OTHERS:
                first_script = first_script or script
                count.words += begins_word
            begins_word = character.isspace() or (begins_word and script == _OTHERS)
        counts.setdefault(first_script or _OTHERS, _Count()).tokens += len(group.tokens)
    counted = [
        ScriptCount(
            script,
            script_count.characters,
            script_count.n_bytes,
            script_count.tokens,
            None if script in _SPACELESS else script_count.words,
        )
        for script, script_count in counts.items()
    ]
    return sorted(counted, key=lambda count: -count.tokens)


@dataclass(slots=True)
class _Count:
    characters: int = 0
    n_bytes: int = 0
    tokens: int = 0
    words: int = 0


def _script(character: str) -> str:
    """Return a letter's script, the first word of its Unicode name; "" for a mark, which has its letter's script."""
    if not unicodedata.category(character).startswith(("L", "M")):
        return _OTHERS
    script = unicodedata.name(character, _OTHERS).partition(" ")[0]
    return "" if script in ("COMBINING", "VARIATION") else _NAMES.get(script, script.capitalize())

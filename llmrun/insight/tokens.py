"""A text as a model's tokens, and what a text of each script costs in them.

Owns what is counted; llama.cpp tokenizes, in the engine. Must not print.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llmrun.config import load_settings
from llmrun.errors import LlmrunError
from llmrun.models.location import locate
from llmrun.protocol.jobs.tokenize import TOKENIZE, TextTokens, TokenizeText
from llmrun.runner import runner

_OTHERS = "digits, signs, spaces"
_NAMES = {"CJK": "Chinese", _OTHERS: _OTHERS}
# Scripts that put no spaces between words, and what is no word.
_SPACELESS = frozenset({"Chinese", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan", _OTHERS})


class Token(NamedTuple):
    """One token of a text: its id, its UTF-8 bytes, maybe not whole characters, and whether it is no text at all."""

    id: int
    data: bytes
    is_control: bool


class TokenGroup(NamedTuple):
    """Tokens that are whole characters together, mostly one token, and their text."""

    tokens: tuple[Token, ...]
    text: str


@dataclass(frozen=True, slots=True)
class TokenizedFile:
    """A text as a model's tokens.

    Attributes:
        path: of the model's file.
        tokens: of the text, in order.
        n_vocab: tokens of the vocabulary.
    """

    path: Path
    tokens: tuple[Token, ...]
    n_vocab: int


@dataclass(frozen=True, slots=True)
class ScriptCount:
    """What the part of a text that is written in one script has.

    Attributes:
        script: such as "Latin"; digits, signs and spaces count together.
        characters, n_bytes: of the text.
        tokens: a token counts where its first letter does.
        words: None where words have no spaces between them.
    """

    script: str
    characters: int
    n_bytes: int
    tokens: int
    words: int | None


def open_vocabulary_ahead(name: str) -> None:
    """Let the prestarted engine load a model's vocabulary while the command line is still being read.

    A guess: if it is wrong, or there is no such model, what comes later finds out and says so.
    """
    with suppress(LlmrunError):
        path = locate(name, load_settings()).path
        if path is not None and path.is_file():
            runner.prestarted().begin(TOKENIZE, TokenizeText(str(path.absolute()), "", special=False))


def tokenize_text(engine: runner.Runner, path: Path, text: str, *, special: bool) -> TokenizedFile:
    """A text's tokens.

    Args:
        special: see llmrun.protocol.jobs.tokenize.TokenizeText.

    Raises:
        BadModelError: the vocabulary can't be loaded, or can't write the text.
        EngineCrashedError: the engine died.
    """
    found = engine.do(TOKENIZE, TokenizeText(str(path.absolute()), text, special))
    return TokenizedFile(path, as_tokens(found), found.n_vocab)


def as_tokens(found: TextTokens) -> tuple[Token, ...]:
    """What the engine told, token by token."""
    known = {piece.token: Token(piece.token, bytes.fromhex(piece.data), piece.is_control) for piece in found.pieces}
    return tuple(known[token] for token in found.tokens)


def groups(tokens: Sequence[Token]) -> Iterator[TokenGroup]:
    """Tokens, those together that share a character. What is no character at all becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held: list[Token] = []
    text = ""
    for token in tokens:
        if token.is_control and held:
            yield TokenGroup(tuple(held), text + decoder.decode(b"", final=True))
            held, text = [], ""
        held.append(token)
        text += decoder.decode(token.data)
        if not decoder.getstate()[0]:
            yield TokenGroup(tuple(held), text)
            held, text = [], ""
    if held:
        yield TokenGroup(tuple(held), text + decoder.decode(b"", final=True))


def script_counts(tokens: Sequence[Token]) -> list[ScriptCount]:
    """What each script takes, the one with most tokens first; control tokens don't count."""
    found: dict[str, _Count] = {}
    script, begins = _OTHERS, True  # of the character before; whether a space came since the last word
    for group in groups([token for token in tokens if not token.is_control]):
        owner = ""
        for character in group.text:
            script = _script(character) or script
            count = found.setdefault(script, _Count())
            count.characters += 1
            count.n_bytes += len(character.encode())
            if script != _OTHERS:
                owner = owner or script
                count.words += begins
            begins = character.isspace() or (begins and script == _OTHERS)
        found.setdefault(owner or _OTHERS, _Count()).tokens += len(group.tokens)
    counts = [
        ScriptCount(script, each.characters, each.n_bytes, each.tokens, None if script in _SPACELESS else each.words)
        for script, each in found.items()
    ]
    return sorted(counts, key=lambda count: -count.tokens)


@dataclass(slots=True)
class _Count:
    characters: int = 0
    n_bytes: int = 0
    tokens: int = 0
    words: int = 0


def _script(character: str) -> str:
    """A letter's script: the first word of its name in Unicode. "" for a mark, which has that of its letter."""
    if not unicodedata.category(character).startswith(("L", "M")):
        return _OTHERS
    script = unicodedata.name(character, _OTHERS).partition(" ")[0]
    return "" if script in ("COMBINING", "VARIATION") else _NAMES.get(script, script.capitalize())

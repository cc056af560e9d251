"""Errors in grammars and schemas, with line and column."""

from __future__ import annotations

import re

from llmrun.errors import BadGrammarError

GRAMMAR = "grammar"
SCHEMA = "JSON schema"
MAX_CHARACTERS = 256 * 1024
_MAX_PATH = 120
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def place(text: str, offset: int) -> str:
    """Return line and column of a character, both from 1, as in "line 3, column 12"."""
    line_start = text.rfind("\n", 0, offset) + 1
    return f"line {text.count(chr(10), 0, offset) + 1}, column {offset - line_start + 1}"


def broken(
    language: str, text: str, offset: int, why: str, hint: str = "", path: tuple[str | int, ...] = ()
) -> BadGrammarError:
    """Return the error for a mistake at a character of a grammar or schema.

    Args:
        language: GRAMMAR or SCHEMA.
        hint: a correction.
        path: of the mistake in a schema.
    """
    where = f" ({dotted(path)})" if path else ""
    error = BadGrammarError(f"the {language} is broken at {place(text, offset)}{where}", why=why, hint=hint)
    error.path = path
    return error


def dotted(path: tuple[str | int, ...]) -> str:
    """Return a path as in "properties.city.anyOf[1].pattern"."""
    written = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
    return written if len(written) <= _MAX_PATH else written[: _MAX_PATH - 1] + "…"


def check_text(language: str, text: str) -> None:
    """Raise BadGrammarError for text that is empty, too large, or has lone surrogates."""
    if not text.strip():
        raise BadGrammarError(f"the {language} is empty", why="nothing is written at line 1, column 1")
    if len(text) > MAX_CHARACTERS:
        why = f"it has {len(text):,} characters, more than {MAX_CHARACTERS:,}"
        raise BadGrammarError(f"the {language} is too large", why=why)
    half = _HALF_CHARACTER.search(text)
    if half:
        raise broken(language, text, half.start(), "here is half a character, which no text can hold")

"""Where in a text something is wrong, in words."""

from __future__ import annotations

import re

from llmrun.errors import BadGrammarError

GRAMMAR = "grammar"
SCHEMA = "JSON schema"
MAX_CHARACTERS = 256 * 1024
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def place(text: str, offset: int) -> str:
    """Line and column of a character, both from 1, as in "line 3, column 12"."""
    line_start = text.rfind("\n", 0, offset) + 1
    return f"line {text.count(chr(10), 0, offset) + 1}, column {offset - line_start + 1}"


def broken(kind: str, text: str, offset: int, why: str, hint: str = "") -> BadGrammarError:
    """The error for a mistake in a grammar or schema.

    Args:
        kind: GRAMMAR or SCHEMA.
        text: all of it.
        offset: of the character where the mistake is.
        why: what it is.
        hint: what to write instead.
    """
    return BadGrammarError(f"the {kind} is broken at {place(text, offset)}", why=why, hint=hint)


def check_text(kind: str, text: str) -> None:
    """Refuse what is empty, larger than any that was written with thought, or no text.

    Raises:
        BadGrammarError: it is.
    """
    if not text.strip():
        raise BadGrammarError(f"the {kind} is empty", why="nothing is written at line 1, column 1")
    if len(text) > MAX_CHARACTERS:
        why = f"it has {len(text):,} characters, more than {MAX_CHARACTERS:,}"
        raise BadGrammarError(f"the {kind} is too large", why=why)
    half = _HALF_CHARACTER.search(text)
    if half:
        raise broken(kind, text, half.start(), "here is half a character, which no text can hold")

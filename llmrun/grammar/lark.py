"""Limits of Lark grammars in llguidance's dialect, checked before llguidance's own parser reads them in the engine."""

from __future__ import annotations

import re

from llmrun.grammar.place import GRAMMAR, broken, check_text, place

MAX_DEPTH = 100

_TOKEN = re.compile(
    r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<quote>")|(?P<token><[^<>\s]+>)',
    re.DOTALL,
)
_PAIRS = {")": "(", "]": "[", "}": "{"}


def check(text: str) -> None:
    """Raise BadGrammarError for text that is too large, nested too deep, or has open quotes or brackets."""
    check_text(GRAMMAR, text)
    opened: list[int] = []
    for match in _TOKEN.finditer(text):
        if match["quote"]:
            raise broken(GRAMMAR, text, match.start(), 'this " is never closed')
        if match["token"]:
            hint = f'name its text in quotes, as in "{match[0]}"'
            raise broken(GRAMMAR, text, match.start(), "a token in angle brackets can't be enforced here", hint)
        if match["open"]:
            if len(opened) >= MAX_DEPTH:
                raise broken(GRAMMAR, text, match.start(), f"brackets are nested more than {MAX_DEPTH} deep")
            opened.append(match.start())
        elif match["close"]:
            if not opened:
                raise broken(GRAMMAR, text, match.start(), f"this {match[0]} was never opened")
            start = opened.pop()
            if text[start] != _PAIRS[match[0]]:
                why = f"this {match[0]} can't close the {text[start]} at {place(text, start)}"
                raise broken(GRAMMAR, text, match.start(), why)
    if opened:
        raise broken(GRAMMAR, text, opened[-1], f"this {text[opened[-1]]} is never closed")

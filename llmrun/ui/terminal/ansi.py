"""Styled text: pieces of text with the SGR parameters that they are shown with. Pure; must not know what they mean."""

from __future__ import annotations

import re

# Text without escapes, and the parameters of its SGR sequence ("1;3"); "" is the terminal's own style.
Span = tuple[str, str]

BOLD, DIM, ITALIC, UNDERLINE, STRIKE = "1", "2", "3", "4", "9"
GREEN, YELLOW, BLUE, MAGENTA, CYAN = "32", "33", "34", "35", "36"

_SGR = re.compile(r"\x1b\[[0-9;]*m")


def joined(outer: str, inner: str) -> str:
    """Two styles at the same time."""
    return f"{outer};{inner}" if outer and inner else outer or inner


def paint(text: str, style: str) -> str:
    """The text in a style, the terminal's own style after it: whatever is written next needs no repair."""
    return f"\x1b[{style}m{text}\x1b[0m" if style and text else text


def bare(text: str) -> str:
    """Painted text without its styles, as it fills cells."""
    return _SGR.sub("", text) if "\x1b" in text else text

"""Styled text: text with the parameters of its SGR sequence. Pure; must not know what it means."""

from __future__ import annotations

import re

DIM = "2"

_SGR = re.compile(r"\x1b\[[0-9;]*m")


def paint(text: str, style: str) -> str:
    """The text in a style ("1;3"), the terminal's own style after it: whatever is written next needs no repair."""
    return f"\x1b[{style}m{text}\x1b[0m" if style and text else text


def bare(text: str) -> str:
    """Painted text without its styles, as it fills cells."""
    return _SGR.sub("", text) if "\x1b" in text else text

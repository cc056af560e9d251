"""Styled text: text with the parameters of its SGR sequence. Pure; must not know the meaning of the text."""

from __future__ import annotations

import re

DIM = "2"

_SGR = re.compile(r"\x1b\[[0-9;]*m")


def paint(text: str, style: str) -> str:
    """Return the text in a style such as "1;3", followed by a reset."""
    return f"\x1b[{style}m{text}\x1b[0m" if style and text else text


def bare(text: str) -> str:
    """Return painted text without its styles."""
    return _SGR.sub("", text) if "\x1b" in text else text

"""The meaning of a typed text: a command, an open or closed triple-quoted block, or a message.

Pure.
"""

from __future__ import annotations

import re

LEAVING_WORDS = ("exit", "quit", "exit()", "quit()")
"""As whole messages, these leave the chat, as in a shell or in Python."""
_FENCE = '"""'
_ESCAPED = re.compile(r"\s*/(?=/\S)")


def is_command(text: str) -> bool:
    """Return whether a typed text is a command: a slash and a name, or a word that leaves."""
    body = text.strip()
    return (body.startswith("/") and not body.startswith("//")) or body in LEAVING_WORDS


def is_open_block(text: str) -> bool:
    """Return whether a message that begins with a fence (three double quotes), or a command with one, is not closed.

    Fences come in pairs, so that a block may contain Python's docstrings.
    """
    body = text.lstrip()
    return (body.startswith(_FENCE) or is_command(body)) and body.count(_FENCE) % 2 == 1


def read_typed(text: str) -> str:
    """Return the message or command that a typed text stands for.

    Removes the outer fences of a block or of a command, and the first of two leading slashes, which marks a message.
    Any other text stays as it is.
    """
    body = text.strip()
    if not (body.startswith(_FENCE) or is_command(body)):
        escape = _ESCAPED.match(text)
        return text[escape.end() :] if escape else text
    before, fence, rest = body.partition(_FENCE)
    inside, closing, after = rest.rpartition(_FENCE)
    if not fence:
        return body
    return before + inside.removeprefix("\n").removesuffix("\n") + after if closing else before + after


def unquoted(text: str) -> str:
    """Return the argument of a command without the quotes around it, if it has no others of that kind."""
    inside, quote = text[1:-1], text[:1]
    return inside if quote in ('"', "'") and text == f"{quote}{inside}{quote}" and quote not in inside else text

'''What a typed text means: a command, a """ block that goes on or is complete, or just a message.

Owns these rules; must not know keys or terminals. Pure.
'''

from __future__ import annotations

import re

LEAVING_WORDS = ("exit", "quit", "exit()", "quit()")
"""Alone in a message, these leave the chat, as in a shell or in Python."""
_FENCE = '"""'
_ESCAPED = re.compile(r"\s*/(?=/\S)")
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_command(text: str) -> bool:
    """Return whether a text that was typed, not pasted, is a command: a slash and a name, or a word that leaves."""
    body = text.strip()
    return (body.startswith("/") and not body.startswith("//")) or body in LEAVING_WORDS


def is_open_block(text: str) -> bool:
    """Whether a message begins with a fence (three double quotes), or a command has one, that is not closed yet.

    Fences come in pairs, so that a block may hold Python's docstrings.
    """
    body = text.lstrip()
    return (body.startswith(_FENCE) or is_command(body)) and body.count(_FENCE) % 2 == 1


def read_typed(text: str) -> str:
    """Return the message or command that a typed text stands for.

    The outer fences of a block or of a command go, and of two slashes at the beginning the first one, which says that
    the text is no command. Any other text stays as it is.
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


def without_surrogates(text: str) -> str:
    """Bytes that were no UTF-8 become U+FFFD; a lone surrogate could not be tokenized."""
    return _SURROGATE.sub("\ufffd", text)

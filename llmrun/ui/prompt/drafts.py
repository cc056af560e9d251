'''What a typed text means: a command, a """ block that goes on or is complete, or just a message.

Owns these rules; must not know keys or terminals. Pure.
'''

from __future__ import annotations

import re

_FENCE = '"""'
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_command(text: str) -> bool:
    """Whether a text that was typed, not pasted, is meant as a slash command."""
    return text.lstrip().startswith("/")


def is_open_block(text: str) -> bool:
    """Whether a message begins with a fence (three double quotes), or a command has one, that is not closed yet.

    Fences come in pairs, so that a block may hold Python's docstrings.
    """
    body = text.lstrip()
    return body.startswith((_FENCE, "/")) and body.count(_FENCE) % 2 == 1


def without_fence(text: str) -> str:
    """What stands between the outer fences of a block, and before and after them; any other text as it is."""
    body = text.strip()
    if not body.startswith((_FENCE, "/")):
        return text
    before, fence, rest = body.partition(_FENCE)
    inside, closing, after = rest.rpartition(_FENCE)
    if not fence:
        return body
    return before + inside.removeprefix("\n").removesuffix("\n") + after if closing else before + after


def without_surrogates(text: str) -> str:
    """Bytes that were no UTF-8 become U+FFFD; a lone surrogate could not be tokenized."""
    return _SURROGATE.sub("\ufffd", text)

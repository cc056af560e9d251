"""The end of the pipe inside a process that has tools: requests come in, answers go out, one JSON object a line.

Owns the descriptors; must not know what the tools are. The chat sends {"call": NAME, "arguments": {...}} or
{"cancel": true}, and is told the tools first: {"tools": [...]}, then {"result": TEXT} or {"error": TEXT} for each call;
{"end": WHY} is the last word of a process that can't go on.
"""

from __future__ import annotations

import json
import os
from typing import Any

_MOST_CHARACTERS = 10_000


class Asking:
    """The chat that asks. What the tools themselves read from stdin is nothing, and what they write to stdout is lost.

    Attributes:
        requests: the descriptor that requests come from; its end is the end of the chat.
    """

    def __init__(self) -> None:
        os.setsid()  # Ctrl-C is for the chat, which ends all of this group if need be
        self.requests, self._answers = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)

    def tell(self, **answer: Any) -> None:
        """Send an answer."""
        data = (json.dumps(answer) + "\n").encode()
        while data:
            data = data[os.write(self._answers, data) :]


def limited(text: str) -> str:
    """A result as a model gets it, which says how much of it was cut off."""
    more = len(text) - _MOST_CHARACTERS
    return text if more <= 0 else f"{text[:_MOST_CHARACTERS]}\n[{more:,} more characters were cut off]"


def in_words(error: BaseException) -> str:
    """What went wrong; of several errors at once, the first."""
    while isinstance(several := getattr(error, "exceptions", None), tuple):
        error = several[0]
    return f"{type(error).__name__}: {error}"

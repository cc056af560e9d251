"""The end of the pipe inside a process that has tools: requests come in, answers go out, one JSON object a line.

Owns the descriptors; must not know what the tools are. The chat sends {"list": true}, then {"call": NAME, "arguments":
{...}} or {"cancel": true}. Answers are {"tools": [...]}, {"result": TEXT} or {"error": TEXT}, or {"end": WHY} where the
process can't go on. Each has its request's "id", which nobody can guess: what tools write to the pipe is no answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

_MOST_CHARACTERS = 10_000


class ToolPrompt:
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
        os.close(nothing)
        self._own = [self.requests, self._answers]
        os.register_at_fork(after_in_child=self._forget)  # programs that are executed inherit neither

    def _forget(self) -> None:
        while self._own:  # once: a child's child may have others of these numbers
            os.close(self._own.pop())

    def tell(self, request: Mapping[str, Any], **answer: Any) -> None:
        """Answer a request."""
        data = (json.dumps({"id": request["id"], **answer}) + "\n").encode()
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

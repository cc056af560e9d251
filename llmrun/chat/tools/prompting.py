"""The tool process's end of the pipe: requests come in, answers go out, one JSON object a line.

The chat sends {"list": true}, then {"call": NAME, "arguments": {...}} or {"cancel": true}. Answers are {"tools":
[...]}, {"result": TEXT} or {"error": TEXT}, or {"end": WHY} if the process can't continue. Each has its request's "id",
which is random, so that output of tools can't be taken for an answer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

_MAX_CHARACTERS = 10_000


class ToolPrompt:
    """The connection to the chat. For the tools, stdin is empty, and stdout is discarded."""

    def __init__(self) -> None:
        self.requests, self._answers = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.close(nothing)
        self._own = [self.requests, self._answers]
        if sys.platform != "win32":
            os.setsid()  # Ctrl-C is for the chat, which ends all of this group if need be
            os.register_at_fork(after_in_child=self._forget)  # programs that are executed inherit neither

    def _forget(self) -> None:
        while self._own:  # once: a child's child may have others of these numbers
            os.close(self._own.pop())

    def tell(self, request: Mapping[str, Any], **answer: Any) -> None:
        data = (json.dumps({"id": request["id"], **answer}) + "\n").encode()
        while data:
            data = data[os.write(self._answers, data) :]


def limited(text: str) -> str:
    """Return a result for the model, cut off at a limit, with a line that says so."""
    more = len(text) - _MAX_CHARACTERS
    return text if more <= 0 else f"{text[:_MAX_CHARACTERS]}\n[{more:,} more characters were cut off]"


def in_words(error: BaseException) -> str:
    """Return the error's type and text; of a group, the first error's."""
    while isinstance(several := getattr(error, "exceptions", None), tuple):
        error = several[0]
    return f"{type(error).__name__}: {error}"

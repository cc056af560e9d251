"""How JSON goes over HTTP piece by piece: server-sent events, and newline-delimited JSON. Pure."""

from __future__ import annotations

import json
import secrets
from typing import Any

_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
COMMENT = b":\n\n"
"""What every reader of server-sent events skips."""
DONE = b"data: [DONE]\n\n"
"""OpenAI's last event."""

PLACE = secrets.token_hex(16)
"""Stands for the text in what a TextEvent is made of; nobody else can write it."""


def event(data: Any, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {to_json(data)}\n\n".encode()


def line(data: Any) -> bytes:
    """A line of newline-delimited JSON."""
    return f"{to_json(data)}\n".encode()


def to_json(data: Any) -> str:
    """JSON without needless blanks; a lone surrogate, which is no UTF-8, becomes an escape."""
    text = _COMPACT.encode(data)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":"))
    return text


class TextEvent:
    """An event that comes again and again, and differs in one text only: all around it is written once.

    Args:
        written: the event with PLACE for the text.
    """

    def __init__(self, written: bytes) -> None:
        self._before, self._after = written.split(f'"{PLACE}"'.encode())

    def with_text(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + to_json(text).encode() + self._after

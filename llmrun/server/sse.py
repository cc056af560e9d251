"""JSON in HTTP bodies and streams: server-sent events, and newline-delimited JSON. Pure."""

from __future__ import annotations

import json
import secrets
from typing import Any

_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_json_text = json.encoder.encode_basestring  # that of _COMPACT, without its layers
EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
COMMENT = b":\n\n"
"""Ignored by every reader of server-sent events."""
DONE = b"data: [DONE]\n\n"
"""OpenAI's last event."""

PLACE = secrets.token_hex(16)
"""Placeholder for the text in a TextEvent; no client can guess it."""


def event(data: Any, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, to_json(data))


def line(data: Any) -> bytes:
    """Return a line of newline-delimited JSON."""
    return to_json(data) + b"\n"


def to_json(data: Any) -> bytes:
    """Return compact JSON. A lone surrogate, which UTF-8 can't express, makes all other than ASCII an escape."""
    try:
        return _COMPACT.encode(data).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()


class TextEvent:
    """An event that is sent many times and differs in one text only; the bytes around the text are encoded once.

    Args:
        encoded: the event with PLACE for the text.
    """

    def __init__(self, encoded: bytes) -> None:
        self._before, self._after = encoded.split(f'"{PLACE}"'.encode())

    def with_text(self, text: str) -> bytes:
        try:
            return self._before + _json_text(text).encode() + self._after
        except UnicodeEncodeError:
            return self._before + to_json(text) + self._after

"""How JSON goes over HTTP piece by piece: server-sent events, and newline-delimited JSON. Pure."""

from __future__ import annotations

import json
from typing import Any

EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
COMMENT = b":\n\n"
"""What every reader of server-sent events skips."""
DONE = b"data: [DONE]\n\n"
"""OpenAI's last event."""


def event(data: Any, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {to_json(data)}\n\n".encode()


def line(data: Any) -> bytes:
    """A line of newline-delimited JSON."""
    return f"{to_json(data)}\n".encode()


def to_json(data: Any) -> str:
    """JSON without needless blanks; a lone surrogate, which is no UTF-8, becomes an escape."""
    try:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":"))
    return text

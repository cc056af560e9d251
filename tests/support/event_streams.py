"""Streams of the protocols' writers: their bytes, their events, and a client that reads them."""

from __future__ import annotations

import json
from typing import Any

import httpx2

from llmrun.protocol.messages import Event
from llmrun.server.answer import AnswerWriter
from support import answers


def calls(first: str, second: str, name: str = "weather", argument: str = "city") -> tuple[Event, ...]:
    """Return the events of two calls with these ids: NAME(ARGUMENT="Rome"), in two pieces, and now()."""
    return (
        answers.call(first, name),
        answers.arguments(f'{{"{argument}": '),
        answers.arguments('"Rome"}', ends=True),
        answers.call(second, "now"),
        answers.arguments("{}", ends=True),
    )


def fed(writer: AnswerWriter, *parts: Event) -> AnswerWriter:
    """Return a writer that has taken these events."""
    for part in parts:
        writer.feed(0, part)
    return writer


def streamed(writer: AnswerWriter, *parts: Event) -> bytes:
    """Return the bytes of a whole stream."""
    return writer.begin() + b"".join(writer.feed(0, part) for part in parts) + writer.end()


def named_events(data: bytes) -> list[dict[str, Any]]:
    """Return the data of server-sent events, each of which is named by its type."""
    events = []
    for block in data.decode().strip().split("\n\n"):
        name, text = block.split("\n")
        events.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def replaying(data: bytes) -> httpx2.Client:
    """Return a client to which every request is answered with this stream."""
    headers = {"content-type": "text/event-stream"}
    return httpx2.Client(transport=httpx2.MockTransport(lambda _: httpx2.Response(200, content=data, headers=headers)))

"""The time limit of a chat template, for front and engine alike. Must not know templates."""

from __future__ import annotations

from collections.abc import Iterable

from llmrun.protocol.messages import Message, Tool

_CHARACTERS_PER_SECOND = 5e6


def characters(messages: Iterable[Message], tools: Iterable[Tool] = ()) -> int:
    """Return the length of all texts of a conversation and its tools."""
    parts = (*(message.texts for message in messages), *tools)
    return sum(len(text) for part in parts for text in part)


def rendering_share(messages: Iterable[Message], tools: Iterable[Tool] = ()) -> float:
    """Return the seconds that a chat template may take for the length of the conversation, added to the fixed limit."""
    return characters(messages, tools) / _CHARACTERS_PER_SECOND

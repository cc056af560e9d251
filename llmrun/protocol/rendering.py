"""How long a chat template may take for a conversation: front and engine count alike.

Owns that share; must not know templates.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmrun.protocol.messages import Message, Tool

_CHARACTERS_PER_SECOND = 5e6


def characters(messages: Iterable[Message], tools: Iterable[Tool] = ()) -> int:
    """How long all texts of a conversation and its tools are together."""
    parts = (*(message.texts for message in messages), *tools)
    return sum(len(text) for part in parts for text in part)


def rendering_share(messages: Iterable[Message], tools: Iterable[Tool] = ()) -> float:
    """Seconds that a chat template may take for the conversation itself, besides what it may take for any."""
    return characters(messages, tools) / _CHARACTERS_PER_SECOND

"""Reasoning in a request: effort, variables of the chat template, and the signature of reasoning sent back. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

from llmrun.errors import UsageError
from llmrun.protocol.arguments import EFFORTS
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.tools import as_json

_OURS = ("messages", "tools", "bos_token", "eos_token", "add_generation_prompt")
_SWITCHES = ("enable_thinking", "preserve_reasoning")
_LONGEST_VARIABLES = 64 * 1024


def read_effort(fields: Fields, key: str) -> str | None:
    return fields.choice(key, *EFFORTS)


def read_reasoning(fields: Fields, effort: str | None = None, thinking: bool | None = None) -> dict[str, Any]:
    """Return the fields of AnswerRequest about reasoning and the chat template.

    Args:
        effort: in the protocol's own field; one in chat_template_kwargs reaches the template as it is.
        thinking: in the protocol's own field; chat_template_kwargs.enable_thinking overrides it.

    Raises:
        UsageError: a variable is invalid, too long, or one that is made from the conversation.
    """
    variables = fields.object("chat_template_kwargs") or Fields({})
    for name in _OURS:
        if name in variables.data:
            raise UsageError(f"{variables.name(name)} can't be set", why="it is made from the request's other fields")
    switch, keeps = variables.flag("enable_thinking"), variables.flag("preserve_reasoning")  # llama-server's
    text = as_json({name: value for name, value in variables.data.items() if name not in _SWITCHES})
    if len(text) > _LONGEST_VARIABLES:
        raise UsageError("chat_template_kwargs is too long", why=f"{_LONGEST_VARIABLES:,} characters at most")
    return {
        "thinking": thinking if switch is None else switch,
        "reasoning_effort": effort,
        "template_variables": text,
        "keep_reasoning": fields.flag("keep_reasoning") if "keep_reasoning" in fields.data else keeps,
    }


def signature(reasoning: str) -> str:
    """Return a digest of reasoning: some clients send back only reasoning that has a signature."""
    return hashlib.sha256(reasoning.encode("utf-8", "replace")).hexdigest()

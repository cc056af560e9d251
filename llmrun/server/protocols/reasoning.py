"""Reasoning in a request, its budget, variables of the chat template, and the beginning of the answer. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from llmrun.errors import UsageError
from llmrun.protocol.arguments import EFFORTS
from llmrun.protocol.messages import Message
from llmrun.protocol.params import MOST_TOKENS
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.tools import as_json

_OURS = ("messages", "tools", "bos_token", "eos_token", "add_generation_prompt")
_SWITCHES = ("enable_thinking", "preserve_reasoning")
_LONGEST_VARIABLES = 64 * 1024
_BUDGETS = (
    "thinking_tokens",
    "thinking_token_budget",  # vLLM
    "reasoning_budget_tokens",  # llama-server, as the next one
    "thinking_budget_tokens",
)
"""Names of the maximum number of reasoning tokens."""


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
    variables = fields.mapping("chat_template_kwargs") or {}
    for name in _OURS:
        if name in variables:
            why = "it is made from the request's other fields"
            raise UsageError(f"{fields.name('chat_template_kwargs')}.{name} can't be set", why=why)
    switches = Fields(variables, fields.name("chat_template_kwargs"))
    switch, keeps = switches.flag("enable_thinking"), switches.flag("preserve_reasoning")  # llama-server's
    text = as_json({name: value for name, value in variables.items() if name not in _SWITCHES})
    if len(text) > _LONGEST_VARIABLES:
        raise UsageError("chat_template_kwargs is too long", why=f"{_LONGEST_VARIABLES:,} characters at most")
    return {
        "thinking": thinking if switch is None else switch,
        "reasoning_effort": effort,
        "template_variables": text,
        "thinking_tokens": _budget(fields),
        "keep_reasoning": fields.flag("keep_reasoning") if "keep_reasoning" in fields.data else keeps,
    }


def read_openrouter_reasoning(fields: Fields) -> dict[str, Any]:
    """Return what read_reasoning() does, of a request that may also have OpenRouter's and OpenAI's `reasoning`."""
    effort, inner = read_effort(fields, "reasoning_effort"), fields.object("reasoning")
    if inner is None:
        return read_reasoning(fields, effort)
    budget = inner.whole("max_tokens", -1, MOST_TOKENS)
    found = read_reasoning(fields, effort or read_effort(inner, "effort"), inner.flag("enabled"))
    return found if budget is None else {**found, "thinking_tokens": None if budget < 0 else budget}


def _budget(fields: Fields) -> int | None:
    budgets = (fields.whole(name, -1, MOST_TOKENS) for name in _BUDGETS)
    budget = next((each for each in budgets if each is not None), -1)
    return None if budget < 0 else budget


def prefilled(messages: Sequence[Message], *, is_asked_for: bool = False) -> dict[str, Any]:
    """Return the fields of AnswerRequest of a conversation whose last message, if the assistant's, is continued.

    Args:
        is_asked_for: the client demands that; else a schema that the message does not fit gets an answer of its own.
    """
    *earlier, last = messages
    if last.role != "assistant" or last.tool_calls or not earlier:
        return {"messages": tuple(messages)}
    begins = {"begins": last.content, "begins_reasoning": last.reasoning, "may_begin_anew": not is_asked_for}
    return {"messages": tuple(earlier), **begins}


def signature(reasoning: str) -> str:
    """Return a digest of reasoning: some clients send back only reasoning that has a signature."""
    return hashlib.sha256(reasoning.encode("utf-8", "replace")).hexdigest()


def compacted(summary: str) -> Message:
    """Return the message that stands for the conversation before it."""
    return Message("user", f"Summary of the conversation so far:\n{summary}")

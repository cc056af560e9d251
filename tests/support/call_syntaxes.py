"""Syntaxes of tool calls, as they are found in the templates of tool_templates.py, and those that are by hand."""

from __future__ import annotations

from llmrun.engine.prompt.call_syntax import syntax_by_vocabulary
from llmrun.engine.prompt.template import ChatTemplate
from llmrun.protocol.toolcalls import CallSyntax
from support.tool_templates import TOOL_TEMPLATES

_BY_HAND = {"lfm2": "<|tool_call_start|>", "granite": "<|tool_call|>"}


def _by_hand(text: str) -> CallSyntax:
    syntax = syntax_by_vocabulary((text,), "")
    assert syntax is not None
    return syntax


SYNTAXES: dict[str, CallSyntax] = {
    **{name: ChatTemplate(source, bos="<s>", eos="</s>").syntax for name, source in TOOL_TEMPLATES.items()},
    **{name: _by_hand(text) for name, text in _BY_HAND.items()},
}

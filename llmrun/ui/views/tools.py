"""Tools and their calls, shown before anything runs. Owns the drawing; must not run tools.

A call is shown whole, with invisible characters as escapes: the user decides by it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import Tool, ToolCall
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean

if TYPE_CHECKING:
    from llmrun.chat.tools.source import Offer

_MAX_RESULT = 160  # characters


def show_call(output: Output, call: ToolCall) -> None:
    """Print a call's name and arguments on stderr."""
    output.note(f"● {call.name}", dim=False)
    try:
        arguments = load_json(call.arguments).items()
    except (ValueError, AttributeError):  # a model may write anything
        arguments = [("arguments", call.arguments)]
    for name, value in arguments:
        first, *more = _shown(value).splitlines() or [""]
        output.note(f"    {_visible(name)}: {first}", dim=False)
        for line in more:
            output.note(f"      {line}", dim=False)


def show_result(output: Output, text: str) -> None:
    """Print the beginning of a call's result on stderr."""
    line = " ".join(clean(text[: 4 * _MAX_RESULT]).split())
    output.note(f"  → {line if len(line) <= _MAX_RESULT else line[: _MAX_RESULT - 1] + '…'}")


def show_tools(output: Output, tools: Sequence[Tool], offers: Sequence[Offer] = ()) -> None:
    """Print a line for each tool: its arguments and the first line of its description; then the other offers."""
    for tool in tools:
        arguments = ", ".join(load_json(tool.parameters).get("properties", {}))
        description = tool.description.strip().partition("\n")[0]
        output.note(f"  {tool.name}({arguments}){'  ' if description else ''}{description}")
    for offer in offers:
        output.note(f"  {offer.kind} {clean(offer.name)}  {clean(offer.about).partition(chr(10))[0]}".rstrip())


def _shown(value: Any) -> str:
    return _visible(value) if isinstance(value, str) else _visible(json.dumps(value, ensure_ascii=False))


def _visible(text: str) -> str:
    """Return the text as it is, or as JSON if a terminal would not show all of it."""
    return text if clean(text, newlines=True) == text else json.dumps(text)

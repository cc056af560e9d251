"""Tools and their calls as a user sees them before anything runs. Owns the drawing; must not know who runs them.

What a model wants to call is shown whole, and what could hide in it as escapes: somebody decides by it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import Tool, ToolCall
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean

_MOST_OF_RESULT = 160  # characters


def show_call(output: Output, call: ToolCall) -> None:
    """The name, and each argument on lines of its own; on stderr."""
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
    """The beginning of what a call came to."""
    line = " ".join(clean(text[: 4 * _MOST_OF_RESULT]).split())
    output.note(f"  → {line if len(line) <= _MOST_OF_RESULT else line[: _MOST_OF_RESULT - 1] + '…'}")


def show_tools(output: Output, tools: Sequence[Tool]) -> None:
    """One line for each, its arguments and the first line of its description."""
    for tool in tools:
        arguments = ", ".join(load_json(tool.parameters).get("properties", {}))
        description = tool.description.strip().partition("\n")[0]
        output.note(f"  {tool.name}({arguments}){'  ' if description else ''}{description}")


def _shown(value: Any) -> str:
    return _visible(value) if isinstance(value, str) else _visible(json.dumps(value, ensure_ascii=False))


def _visible(text: str) -> str:
    """The text as it is, or as JSON where a terminal would not show all of it."""
    return text if clean(text, newlines=True) == text else json.dumps(text)

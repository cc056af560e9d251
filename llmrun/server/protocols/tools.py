"""Tools, schemas and pictures in a request, as all protocols have them.

Owns what they may be; must not know where a protocol puts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

from llmrun.errors import UsageError
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import Tool, ToolCall
from llmrun.protocol.toolcalls import TOOL_NAME, TOOL_NAME_RULE
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.sampling import schema_grammar

_MOST_TOOLS = 512


def as_json(value: Any) -> str:
    """A value as the text that a model reads."""
    return json.dumps(value, ensure_ascii=False)


def tool(function: Fields, parameters: str) -> Tool:
    """A function that can be called.

    Args:
        parameters: the key of its schema. One that is `strict` has to be enforceable; of others, as much as can be
            enforced is.

    Raises:
        UsageError, BadGrammarError: it can't be called.
    """
    schema = function.object(parameters)
    if function.flag("strict"):
        schema_grammar(schema.data if schema is not None else {})
    written = as_json(schema.data) if schema is not None else "{}"
    return Tool(tool_name(function), function.text("description") or "", written)


def tool_name(function: Fields) -> str:
    """The name of a function."""
    name = function.needed_text("name")
    if not TOOL_NAME.fullmatch(name):
        raise UsageError(f"invalid {function.name('name')}", why=TOOL_NAME_RULE)
    return name


def checked_tools(tools: Iterable[Tool], choice: str) -> tuple[Tool, ...]:
    """The tools, where each has a name of its own and what has to be called is among them.

    Raises:
        UsageError: they can't be used so.
    """
    given = tuple(tools)
    names = [tool.name for tool in given]
    if len(given) > _MOST_TOOLS:
        raise UsageError(f"invalid tools: {len(given):,} of them", why=f"there may be {_MOST_TOOLS} at most")
    if len(set(names)) < len(names):
        raise UsageError("invalid tools", why="two have the same name")
    if choice == "required" and not given:
        raise UsageError("invalid tool_choice", why="a call is required, and there are no tools")
    if choice.startswith("=") and choice[1:] not in names:
        raise UsageError("invalid tool_choice", why=f"there is no tool {choice[1:]!r}")
    return given


def tool_call(name_of_call: str, function: Fields) -> ToolCall:
    """A call that the model made earlier. Its arguments are an object, or the text of one.

    Raises:
        UsageError: they are something else.
    """
    arguments = function.data.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments or "{}")
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise UsageError(f"invalid {function.name('arguments')}", why="must be a JSON object")
    return ToolCall(name_of_call, tool_name(function), as_json(arguments))


def call_arguments(call: ToolCall) -> dict[str, Any] | None:
    """Return the arguments of a call by the model; None if the answer ended in the middle of them."""
    try:
        value = load_json(call.arguments)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def refuse_media(what: str) -> NoReturn:
    """Something came that can't be read here."""
    raise UsageError(f"{what} can't be read", why="only text is, and pictures in messages are", hint="leave it out")

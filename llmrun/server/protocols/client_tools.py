"""The tools of a Responses request as the model gets them: namespaces are flattened, a text is an object's one string.

Pure. Codex has MCP servers and sub-agents in namespaces, and custom tools for patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import Tool
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.tools import TEXT_ARGUMENT, as_json, tool, tool_name

_SCHEMA = {"type": "object", "properties": {TEXT_ARGUMENT: {"type": "string"}}, "required": [TEXT_ARGUMENT]}
_KINDS = ("function", "custom")


class ClientTool(NamedTuple):
    """A tool in the client's terms."""

    name: str
    namespace: str = ""
    is_custom: bool = False  # a call has a text instead of arguments


def flat_name(item: Fields) -> str:
    """Return the model's name of a tool; `item` has its name, and perhaps a namespace.

    Raises:
        UsageError: a name is invalid.
    """
    name, namespace = tool_name(item), item.text("namespace") or ""
    if not namespace:
        return name
    joined = f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"
    return tool_name(Fields({"name": joined}, item.name("namespace")))


def read_tools(fields: Fields) -> list[Tool]:
    """Return the functions and custom tools; tools of OpenAI's servers are left out.

    Raises:
        UsageError, BadGrammarError: a tool is invalid.
    """
    return [_tool(each) for each in _flattened(fields)]


def client_tools(fields: Fields) -> dict[str, ClientTool]:
    """Return the client's tools by the model's names of them."""
    return {
        flat_name(each): ClientTool(tool_name(each), each.text("namespace") or "", each.text("type") == "custom")
        for each in _flattened(fields)
    }


def custom_input(arguments: str) -> str:
    """Return the text of a call of a custom tool; the JSON itself if the answer ended in the middle of it."""
    try:
        value = load_json(arguments)
    except ValueError:
        return arguments
    text = value.get(TEXT_ARGUMENT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _flattened(fields: Fields) -> Iterator[Fields]:
    for each in fields.objects("tools"):
        if each.text("type") in _KINDS:
            yield each
        elif each.text("type") == "namespace":
            namespace = tool_name(each)
            for inner in each.objects("tools"):
                if inner.text("type") in _KINDS:
                    yield inner.extended(namespace=namespace)
                else:
                    inner.ignore_all()
        else:
            each.ignore_all()


def _tool(each: Fields) -> Tool:
    if each.text("type") == "custom":
        return Tool(flat_name(each), each.text("description") or "", as_json(_SCHEMA))
    return tool(each, "parameters")._replace(name=flat_name(each))

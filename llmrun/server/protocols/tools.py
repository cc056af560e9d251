"""Tools and tool calls in a request, with the rules that all protocols share.

The model gets the tools of a Responses request with flat names; a custom tool's text is an object's one string.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from llmrun.errors import BadGrammarError, UsageError
from llmrun.grammar.json_lark import rules_of
from llmrun.grammar.lark_rules import of_pattern
from llmrun.grammar.place import dotted
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import Tool, ToolCall
from llmrun.protocol.toolcalls import TOOL_NAME, TOOL_NAME_RULE
from llmrun.server.protocols.fields import Fields, as_json
from llmrun.server.protocols.options import schema_grammar

TEXT_ARGUMENT = "input"
"""Name of the argument of a call that has a text instead of an object."""
_MOST_TOOLS = 512


def tool(function: Fields, parameters: str) -> Tool:
    """Return a tool.

    Args:
        parameters: the key of its schema. If the tool is `strict`, all of the schema must be enforceable; otherwise as
            much as possible is enforced.

    Raises:
        UsageError, BadGrammarError: the tool is invalid.
    """
    schema = function.mapping(parameters) or {}
    if function.flag("strict"):
        text = schema_grammar(schema, is_strict=True).text
        if repeating := rules_of(text, is_strict=True).repeating:
            why = f"{dotted(repeating[0])} can't be enforced while a call is written, for so many different values"
            raise BadGrammarError("the JSON schema of a strict tool can't be followed", why=why)
    return Tool(tool_name(function), function.text("description") or "", as_json(schema))


def tool_name(function: Fields) -> str:
    name = function.needed_text("name")
    if not TOOL_NAME.fullmatch(name):
        raise UsageError(f"invalid {function.name('name')}", why=TOOL_NAME_RULE)
    return name


def checked_tools(tools: Iterable[Tool], choice: str) -> tuple[Tool, ...]:
    """Return the tools, if their names differ and the required one is among them.

    Raises:
        UsageError: the tools or the choice are invalid.
    """
    given = tuple(tools)
    names = [tool.name for tool in given]
    if len(given) > _MOST_TOOLS:
        raise UsageError(f"invalid tools: {len(given):,} of them", why=f"the maximum is {_MOST_TOOLS}")
    if len(set(names)) < len(names):
        raise UsageError("invalid tools", why="two have the same name")
    if choice == "required" and not given:
        raise UsageError("invalid tool_choice", why="a call is required, and there are no tools")
    if choice.startswith("=") and choice[1:] not in names:
        raise UsageError("invalid tool_choice", why=f"there is no tool {choice[1:]!r}")
    return given


def tool_call(call_id: str, function: Fields, key: str = "arguments") -> ToolCall:
    """Return a call from an earlier turn. Its arguments are an object, or the text of one.

    Another text, such as that of a call in the middle of which an answer ended, becomes the argument TEXT_ARGUMENT.

    Raises:
        UsageError: they are something else.
    """
    arguments = function.value(key) or ""
    if isinstance(arguments, str):
        found = _object(arguments or "{}")
        arguments = {TEXT_ARGUMENT: arguments} if found is None else found
    if not isinstance(arguments, dict):
        raise UsageError(f"invalid {function.name(key)}", why="must be a JSON object")
    return ToolCall(call_id, tool_name(function), as_json(arguments))


def complete_calls(calls: Iterable[ToolCall]) -> list[tuple[ToolCall, dict[str, Any]]]:
    """Return the model's calls with their arguments, without a call in the middle of which the answer ended."""
    return [(call, arguments) for call in calls if (arguments := _object(call.arguments)) is not None]


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = load_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


_SCHEMA = {"type": "object", "properties": {TEXT_ARGUMENT: {"type": "string"}}, "required": [TEXT_ARGUMENT]}
_KINDS = ("function", "custom")
_GRAMMAR_NOTE = "The text matches this Lark grammar:"


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
    return [_client_tool(each) for each in _flattened(fields)]


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
            about = each.text("description") or ""
            for inner in each.objects("tools"):
                if inner.text("type") in _KINDS:
                    described = "\n\n".join(filter(None, (about, inner.text("description"))))
                    yield inner.extended(namespace=namespace, description=described)
                    about = ""  # the first tool says it for all
                else:
                    inner.ignore_all()
        else:
            each.ignore_all()


def _text_grammar(each: Fields) -> str:
    """Return the Lark grammar of a custom tool's text; "" allows any text.

    Raises:
        UsageError: the format is invalid.
    """
    given = each.object("format")
    if given is None or given.choice("type", "text", "grammar") != "grammar":
        return ""
    definition = given.needed_text("definition")
    return of_pattern(definition) if given.choice("syntax", "lark", "regex") == "regex" else definition


def _client_tool(each: Fields) -> Tool:
    if each.text("type") == "custom":
        grammar = _text_grammar(each)
        texts = each.text("description") or "", f"{_GRAMMAR_NOTE}\n{grammar}" if grammar else ""
        return Tool(flat_name(each), "\n\n".join(filter(None, texts)), as_json(_SCHEMA), grammar)
    return tool(each, "parameters")._replace(name=flat_name(each))

"""Tools in a prompt: what a chat template gets of them, and in which syntax it has its model call them.

Owns what stands in for a template that knows no tools, or writes calls in a way that can't be told here: the tools are
described in the system prompt, calls and their results are text. Pure; must not know Jinja.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llmrun.errors import UsageError
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import AnswerRequest, Message, Tool, ToolCall
from llmrun.protocol.toolcalls import HERMES, SYNTAXES, Syntax

OTHERS = HERMES
"""The syntax for models whose templates have none that is known."""

_INSTRUCTIONS = """You may call functions to answer. These are their signatures, one JSON object in each line:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as JSON between these tags, and nothing behind them:
<tool_call>
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


def offers_tools(asked: AnswerRequest) -> bool:
    """Whether the answer may call a tool."""
    return bool(asked.tools) and asked.prompt is None and asked.tool_choice != "none"


def waits_for_call(asked: AnswerRequest) -> bool:
    """Whether the answer may be anything else before a call, or instead of one."""
    return asked.tool_choice == "auto" and asked.grammar is None


PROBE_TOOL = Tool("tell_time", "Tells the time of a town.")
_PROBE_ARGUMENTS = '{"town": "Rome"}'
PROBE = (
    Message("user", "How late is it in Rome?"),
    Message("assistant", "", (ToolCall("callprobe", PROBE_TOOL.name, _PROBE_ARGUMENTS),)),
    Message("tool", "Noon", tool_call_id="callprobe", name=PROBE_TOOL.name),
)
"""What a template makes of this shows in which syntax its model calls tools."""


def syntax_in(rendered: str) -> Syntax | None:
    """The syntax of the call in the rendered PROBE; None if it, or the tool, is not told in a way that is known."""
    if PROBE_TOOL.description not in rendered:
        return None
    return next((syntax for syntax in SYNTAXES.values() if _probe_call(syntax) in rendered), None)


def _probe_call(syntax: Syntax) -> str:
    arguments, form = _PROBE_ARGUMENTS, syntax.parameter
    if form is not None:
        arguments = "".join(
            form.begin + name + form.middle + form.quote + value + form.quote + form.end
            for name, value in load_json(arguments).items()
        )
    before, behind = syntax.told or (syntax.begin + syntax.first, syntax.middle)
    return f"{before}{PROBE_TOOL.name}{behind}{arguments}"


def in_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """A conversation as a template takes it that knows no tools."""
    told: list[Message] = []
    was_result = False
    for message in messages:
        is_result = message.role == "tool"
        if is_result:
            message = Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
        elif message.tool_calls:
            calls = (_written(call) for call in message.tool_calls)
            message = Message(message.role, "\n".join(filter(None, (message.content, *calls))))
        if was_result and message.role == "user":  # many templates want the roles to alternate
            message = Message("user", f"{told.pop().content}\n{message.content}")
        told.append(message)
        was_result = is_result or (was_result and message.role == "user")
    if not tools:
        return told
    instructions = _INSTRUCTIONS.format(tools="\n".join(map(_signature, tools)))
    if told and told[0].role == "system":
        return [Message("system", f"{told[0].content}\n\n{instructions}"), *told[1:]]
    return [Message("system", instructions), *told]


def _written(call: ToolCall) -> str:
    ending = OTHERS.close.lstrip()
    return f"{OTHERS.begin}{OTHERS.first}{call.name}{OTHERS.middle}{call.arguments}{ending}"


def _signature(tool: Tool) -> str:
    return json.dumps(tool_data(tool, lambda text: text)["function"], ensure_ascii=False)


def tool_data(tool: Tool, hide: Callable[[str], str]) -> dict[str, Any]:
    """A tool as templates get it, in OpenAI's shape; hide() is done to every text in it."""
    return {
        "type": "function",
        "function": {
            "name": hide(tool.name),
            "description": hide(tool.description),
            "parameters": _data(tool.parameters, hide),
        },
    }


def message_data(message: Message, hide: Callable[[str], str]) -> dict[str, Any]:
    """A message as templates get it, in OpenAI's shape but for the arguments of calls, which are objects."""
    data: dict[str, Any] = {"role": message.role, "content": hide(message.content)}
    if message.tool_calls:
        data["tool_calls"] = [
            {
                "id": hide(call.id),
                "type": "function",
                "function": {"name": hide(call.name), "arguments": _data(call.arguments, hide)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        data |= {"tool_call_id": hide(message.tool_call_id), "name": hide(message.name)}
    return data


def with_responses(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as Gemma's templates want them: results are in the message with their calls, and so is what follows.

    What was said before the calls is left out, because it would end the model's turn.
    """
    told: list[dict[str, Any]] = []
    for message in messages:
        last = told[-1] if told else {}
        if message["role"] == "tool" and last.get("tool_calls"):
            names = {call["id"]: call["function"]["name"] for call in last["tool_calls"]}
            name = names.get(message["tool_call_id"], message["name"])
            response = {"name": name, "response": message["content"]}
            told[-1] = {**last, "content": "", "tool_responses": [*last.get("tool_responses", ()), response]}
        elif message["role"] == "assistant" and last.get("tool_responses") and not message.get("tool_calls"):
            told[-1] = {**last, "content": message["content"]}
        else:
            told.append(message)
    return told


def texts(messages: Sequence[Message], tools: Sequence[Tool]) -> list[str]:
    """All texts that the templates get of these.

    Raises:
        UsageError: a schema or arguments are not JSON, or nested too deep.
    """
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    for message in messages:
        message_data(message, note)
    for tool in tools:
        tool_data(tool, note)
    return found


def _data(text: str, hide: Callable[[str], str]) -> Any:
    try:
        return _each_text(load_json(text), hide)
    except ValueError as error:
        raise UsageError("the tools can't be used", why=f"their schemas or arguments are not JSON: {error}") from None


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """JSON data with something done to every text in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_text(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _each_text(item, change) for key, item in value.items()}
    return value


def for_mistral(messages: Sequence[Message]) -> list[Message]:
    """A conversation as Mistral's templates demand it: ids of nine letters and digits, and no question behind a result.

    Calls without an id, as Ollama's clients send them, get one in their order, and so do their results. What a user
    says beside a result, as Claude Code's does, goes into it.
    """
    waiting: deque[str] = deque()
    told: list[Message] = []
    for index, message in enumerate(messages):
        if message.tool_calls:
            calls = tuple(
                call._replace(id=_short(call.id or f"{index} {number}"))
                for number, call in enumerate(message.tool_calls)
            )
            waiting.extend(call.id for call in calls)
            told.append(replace(message, tool_calls=calls))
        elif message.role == "tool":
            named = _short(message.tool_call_id) if message.tool_call_id else (waiting[0] if waiting else _short(""))
            if named in waiting:
                waiting.remove(named)
            told.append(replace(message, tool_call_id=named))
        elif message.role == "user" and told and told[-1].role == "tool":
            told[-1] = replace(told[-1], content=f"{told[-1].content}\n\n{message.content}")
        else:
            told.append(message)
    return told


def _short(name: str) -> str:
    return (
        name if len(name) == 9 and name.isalnum() else hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:9]
    )

"""The tools of a conversation: data for the chat template, and detection of the model's syntax of calls.

If the template has no tools, or an unknown syntax of calls, the system prompt describes the tools, and calls and
results are text. Pure; must not know Jinja.
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

OTHERS = HERMES  # The syntax of models whose templates have no known one

_INSTRUCTIONS = """You may call functions to answer. These are their signatures, one JSON object in each line:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as JSON between these tags, and nothing behind them:
<tool_call>
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


def offers_tools(request: AnswerRequest) -> bool:
    return bool(request.tools) and request.prompt is None and request.tool_choice != "none"


def allows_text(request: AnswerRequest) -> bool:
    """Return whether the answer may be text before a call, or instead of one."""
    return request.tool_choice == "auto" and request.grammar is None


PROBE_TOOL = Tool("tell_time", "Tells the time of a town.")
_PROBE_ARGUMENTS = '{"town": "Rome"}'
PROBE = (
    Message("user", "How late is it in Rome?"),
    Message("assistant", "", (ToolCall("callprobe", PROBE_TOOL.name, _PROBE_ARGUMENTS),)),
    Message("tool", "Noon", tool_call_id="callprobe", name=PROBE_TOOL.name),
)
"""A conversation that shows the syntax of calls when a template renders it."""


def syntax_in(rendered: str) -> Syntax | None:
    """Return the syntax of the call in the rendered PROBE; None if the tool is missing or the syntax is unknown."""
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
    before, after = syntax.told or (syntax.begin + syntax.first, syntax.middle)
    return f"{before}{PROBE_TOOL.name}{after}{arguments}"


def in_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Rewrite a conversation for a template without tools."""
    rewritten: list[Message] = []
    was_result = False
    for message in messages:
        is_result = message.role == "tool"
        message = as_text(message)
        if was_result and message.role == "user":  # many templates demand alternating roles
            message = Message("user", f"{rewritten.pop().content}\n{message.content}")
        rewritten.append(message)
        was_result = is_result or (was_result and message.role == "user")
    if not tools:
        return rewritten
    signatures = (json.dumps(tool_data(tool, str)["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools="\n".join(signatures))
    if rewritten and rewritten[0].role == "system":
        return [Message("system", f"{rewritten[0].content}\n\n{instructions}"), *rewritten[1:]]
    return [Message("system", instructions), *rewritten]


def as_text(message: Message) -> Message:
    """Return a message with its calls as text; a result becomes the user's."""
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    content = "\n".join(filter(None, (message.content, *map(_format_call, message.tool_calls))))
    return replace(message, content=content, tool_calls=())


def _format_call(call: ToolCall) -> str:
    ending = OTHERS.close.lstrip()
    return f"{OTHERS.begin}{OTHERS.first}{call.name}{OTHERS.middle}{call.arguments}{ending}"


def tool_data(tool: Tool, hide: Callable[[str], str]) -> dict[str, Any]:
    """Return a tool in OpenAI's format, as templates expect it, with hide() applied to every text."""
    return {
        "type": "function",
        "function": {
            "name": hide(tool.name),
            "description": hide(tool.description),
            "parameters": data_of(tool.parameters, hide),
        },
    }


def message_data(message: Message, hide: Callable[[str], str]) -> dict[str, Any]:
    """Return a message in OpenAI's format with hide() applied to every text; arguments of calls are objects.

    Reasoning has all the names that templates have for it: each template has its own, and keeps it or leaves it out.
    """
    data: dict[str, Any] = {"role": message.role, "content": hide(message.content)}
    if message.reasoning:
        data |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), hide(message.reasoning))
    if message.tool_calls:
        data["tool_calls"] = [
            {
                "id": hide(call.id),
                "type": "function",
                "function": {"name": hide(call.name), "arguments": data_of(call.arguments, hide)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        data |= {"tool_call_id": hide(message.tool_call_id), "name": hide(message.name)}
    return data


def with_responses(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rewrite messages for Gemma's templates: calls, their results and the answer to these are one message.

    Text before the calls is left out, because it would end the model's turn.
    """
    rewritten: list[dict[str, Any]] = []
    for message in messages:
        last = rewritten[-1] if rewritten else {}
        if message["role"] == "tool" and last.get("tool_calls"):
            names = {call["id"]: call["function"]["name"] for call in last["tool_calls"]}
            name = names.get(message["tool_call_id"], message["name"])
            response = {"name": name, "response": message["content"]}
            rewritten[-1] = {**last, "content": "", "tool_responses": [*last.get("tool_responses", ()), response]}
        elif message["role"] == "assistant" and last.get("tool_responses") and not message.get("tool_calls"):
            rewritten[-1] = {**last, "content": message["content"]}
        else:
            rewritten.append(message)
    return rewritten


def collect_texts(messages: Sequence[Message], tools: Sequence[Tool], variables: str = "{}") -> list[str]:
    """Return all texts in the data of these messages, tools and template variables.

    Raises:
        UsageError: a schema, arguments or variables are not JSON, or nested too deep.
    """
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    for message in messages:
        message_data(message, collect)
    for tool in tools:
        tool_data(tool, collect)
    data_of(variables, collect)
    return texts


def data_of(text: str, hide: Callable[[str], str], *, keys: bool = True) -> Any:
    """Return JSON data with hide() applied to every text; with `keys`, to the keys of the outermost object too.

    Raises:
        UsageError: it is not JSON, or nested too deep.
    """
    try:
        data = load_json(text)
    except ValueError as error:
        raise UsageError(
            "tools or template variables can't be used", why=f"they have text that is not JSON: {error}"
        ) from None
    return _map_texts(data, hide) if keys else {name: _map_texts(value, hide) for name, value in data.items()}


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply a function to every text in JSON data, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_texts(item, change) for key, item in value.items()}
    return value


def for_mistral(messages: Sequence[Message]) -> list[Message]:
    """Rewrite a conversation for Mistral's templates: ids of nine letters and digits, and no question after a result.

    Calls without ids (Ollama's clients) and their results get ids in order. A user's text after a result (Claude Code)
    is appended to it.
    """
    pending: deque[str] = deque()
    rewritten: list[Message] = []
    for index, message in enumerate(messages):
        if message.tool_calls:
            calls = tuple(
                call._replace(id=_short_id(call.id or f"{index} {number}"))
                for number, call in enumerate(message.tool_calls)
            )
            pending.extend(call.id for call in calls)
            rewritten.append(replace(message, tool_calls=calls))
        elif message.role == "tool":
            call_id = (
                _short_id(message.tool_call_id) if message.tool_call_id else (pending[0] if pending else _short_id(""))
            )
            if call_id in pending:
                pending.remove(call_id)
            rewritten.append(replace(message, tool_call_id=call_id))
        elif message.role == "user" and rewritten and rewritten[-1].role == "tool":
            rewritten[-1] = replace(rewritten[-1], content=f"{rewritten[-1].content}\n\n{message.content}")
        else:
            rewritten.append(message)
    return rewritten


def _short_id(name: str) -> str:
    return (
        name if len(name) == 9 and name.isalnum() else hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:9]
    )

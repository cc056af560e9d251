"""The tools of a conversation, in the form in which a chat template takes them, which trial renderings show.

What a template does not take, the system prompt and the messages say in text. Pure; must not know Jinja.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from llmrun.errors import UsageError
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import AnswerRequest, Message, Tool, ToolCall
from llmrun.protocol.toolcalls import CallSyntax

_INSTRUCTIONS = """You may call functions to answer. These are their signatures, one JSON object in each line:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as JSON between these tags, and nothing behind them:
{example}"""
_EXAMPLE = ToolCall("ID", "FUNCTION", '{"ARGUMENT": "VALUE"}')


def tells_tools(request: AnswerRequest) -> bool:
    """Return whether the prompt describes tools, also those that must not be called, so that prefixes stay."""
    return bool(request.tools) and request.prompt is None


def offers_tools(request: AnswerRequest) -> bool:
    return tells_tools(request) and request.tool_choice != "none"


def allows_text(request: AnswerRequest) -> bool:
    """Return whether the answer may be text before a call, or instead of one."""
    return request.tool_choice == "auto" and request.grammar is None


PROBE_TOOL = Tool(
    "tell_time",
    "Tells the time of a town.",
    '{"type": "object", "description": "What to tell.", '
    '"properties": {"town": {"type": "string", "description": "Its name."}}}',
)
PROBE = (
    Message("user", "How late is it in Rome?"),
    Message("assistant", "", (ToolCall("call_0123456789abcdefghij", PROBE_TOOL.name, '{"town": "Rome!"}'),)),
    Message("tool", "Noon", tool_call_id="call_0123456789abcdefghij", name=PROBE_TOOL.name),
)
"""A conversation with a call and its result, for trial renderings."""


class ToolForm(NamedTuple):
    """The form in which a template takes calls and their results."""

    arguments_as_text: bool = False  # JSON in a string, not an object
    ids: str = "any"  # or "short": nine letters and digits; or "named": functions.NAME:NUMBER
    results_in_calls: bool = False  # results stand in the message of their calls
    no_content: bool = False  # a call without text has no content; else an empty one


_PLAIN_FORM = ToolForm()


class Render(Protocol):
    """Renders a short conversation by a chat template, as a trial."""

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        form: ToolForm | None = None,
        thinking: bool | None = None,
        begins: bool = True,
    ) -> str:
        """Return the prompt; "" if the template refuses the conversation.

        Args:
            form: of calls and results; None for the best one.
            thinking: the template's enable_thinking; None leaves it undefined.
            begins: with the beginning of the next answer.
        """


class ToolSupport(NamedTuple):
    """The parts of tools that a template writes, in the best form for it."""

    form: ToolForm = _PLAIN_FORM
    tools: bool = False  # descriptions
    calls: bool = False
    results: bool = False


def find_support(render: Render, tools: Sequence[Tool], *, knows_responses: bool) -> ToolSupport:
    """Find out which parts of tools a template writes.

    Args:
        tools: of the trial: that of PROBE, or none.
        knows_responses: the template can take results in the message of their calls.
    """
    best = ToolSupport()
    places: Sequence[bool] = (True, False) if knows_responses else (False,)
    forms = itertools.product((False, True), places, ("any", "short", "named"), (False, True))
    for no_content, in_calls, ids, as_text in forms:
        form = ToolForm(as_text, ids, in_calls, no_content)
        support = _support(render(PROBE, tools, form=form), form)
        if sum(support[1:]) > sum(best[1:]):
            best = support
        if best.calls and best.results:
            break
    return best


def _support(prompt: str, form: ToolForm) -> ToolSupport:
    turn = prompt.rpartition(PROBE[0].content)[2]
    is_python, is_escaped = "{'town'" in turn, '\\"town' in turn
    calls = "Rome!" in turn and PROBE_TOOL.name in turn and not is_python and not is_escaped
    tools = PROBE_TOOL.description in prompt
    return ToolSupport(form, tools, calls, PROBE[-1].content in turn)


def in_text(
    messages: Sequence[Message], tools: Sequence[Tool], support: ToolSupport, syntax: CallSyntax
) -> tuple[list[Message], Sequence[Tool]]:
    """Say in text what a template does not write of tools, calls and results; return what is left to it."""
    rewritten: list[Message] = []
    was_result = False
    for message in messages:
        is_result = message.role == "tool" and not support.results
        if is_result or not support.calls:
            message = as_text(message, syntax) if is_result or message.tool_calls else message
        if was_result and message.role == "user":  # many templates demand alternating roles
            message = Message("user", f"{rewritten.pop().content}\n{message.content}")
        rewritten.append(message)
        was_result = is_result or (was_result and message.role == "user")
    if support.tools or not tools:
        return rewritten, tools
    signatures = (json.dumps(tool_data(tool, str)["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools="\n".join(signatures), example=syntax.write((_EXAMPLE,)))
    if rewritten and rewritten[0].role == "system":
        return [Message("system", f"{rewritten[0].content}\n\n{instructions}"), *rewritten[1:]], ()
    return [Message("system", instructions), *rewritten], ()


def as_text(message: Message, syntax: CallSyntax) -> Message:
    """Return a message with its calls as text; a result becomes the user's."""
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    content = "\n".join(filter(None, (message.content, syntax.write(message.tool_calls))))
    return replace(message, content=content, tool_calls=())


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


def with_simple_schema(tool: Tool) -> Tool:
    """Return a tool with one type for each parameter, for templates that fail at several, or at a missing one."""
    schema = data_of(tool.parameters, str)
    if isinstance(schema, dict):
        schema = {"type": "object", "properties": {}, **schema}
    return tool._replace(parameters=json.dumps(_simple(schema), ensure_ascii=False))


def _simple(schema: Any) -> Any:
    if isinstance(schema, list):
        return [*map(_simple, schema)]
    if not isinstance(schema, dict):
        return schema
    simple = {name: _simple(value) for name, value in schema.items()}
    if isinstance(simple.get("properties"), dict):
        simple["properties"] = {
            name: {} if isinstance(value, bool) else value for name, value in simple["properties"].items()
        }
    if isinstance(simple.get("type"), list):
        simple["type"] = next((type_name for type_name in simple["type"] if type_name != "null"), "null")
    return simple


def message_data(message: Message, hide: Callable[[str], str], form: ToolForm = _PLAIN_FORM) -> dict[str, Any]:
    """Return a message in OpenAI's format with hide() applied to every text.

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
                "function": {"name": hide(call.name), "arguments": _arguments(call, hide, form)},
            }
            for call in message.tool_calls
        ]
        if form.no_content and not message.content:
            data["content"] = None
    if message.role == "tool":
        data |= {"tool_call_id": hide(message.tool_call_id), "name": hide(message.name)}
    return data


def _arguments(call: ToolCall, hide: Callable[[str], str], form: ToolForm) -> Any:
    data = data_of(call.arguments, hide)
    return json.dumps(data, ensure_ascii=False) if form.arguments_as_text else data


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


def with_ids(messages: Sequence[Message], ids: str) -> list[Message]:
    """Give calls and their results the ids that a template wants, see ToolForm.

    Calls without ids (Ollama's clients) and their results get ids in order.
    """
    pending: deque[str] = deque()
    given: dict[str, str] = {}
    rewritten: list[Message] = []
    n_calls = 0
    for message in messages:
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                name = _call_id(call, n_calls, ids)
                given[call.id] = name
                pending.append(name)
                calls.append(call._replace(id=name))
                n_calls += 1
            message = replace(message, tool_calls=tuple(calls))
        elif message.role == "tool":
            name = given.get(message.tool_call_id, "") if message.tool_call_id else ""
            name = name or (
                pending[0]
                if pending and not message.tool_call_id
                else _call_id(ToolCall(message.tool_call_id, message.name, ""), n_calls, ids)
            )
            if name in pending:
                pending.remove(name)
            message = replace(message, tool_call_id=name)
        rewritten.append(message)
    return rewritten


def _call_id(call: ToolCall, number: int, ids: str) -> str:
    form = {"any": ".*", "short": "[A-Za-z0-9]{9}", "named": rf"functions\.{re.escape(call.name)}:[0-9]+"}[ids]
    if re.fullmatch(form, call.id, re.DOTALL):
        return call.id
    if ids == "named":
        return f"functions.{call.name}:{number}"
    return hashlib.sha256((call.id or str(number)).encode("utf-8", "replace")).hexdigest()[:9]

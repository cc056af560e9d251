"""OpenAI's chat completions. Pure; see llmrun.server.answer_parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmrun.errors import UsageError
from llmrun.protocol.logprobs import MOST_TOP_LOGPROBS
from llmrun.protocol.messages import AnswerRequest, Message, TokenLogprob, ToolCall
from llmrun.protocol.params import MOST_TOKENS
from llmrun.server import sse
from llmrun.server.answer_parts import (
    AccumulatedAnswer,
    AnswerText,
    CallArguments,
    CallStarted,
    CompletionRequest,
    Envelope,
    Part,
    ReasoningText,
    ResponseStarted,
)
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai import CompletionWriter, asked, content, error_body, logprobs, reason_of
from llmrun.server.protocols.sampling import (
    read_grammar_fields,
    read_limits,
)
from llmrun.server.protocols.tools import checked_tools, tool, tool_call, tool_name

__all__ = ["error_body", "read", "writer"]

_ROLES = {"developer": "system"}


def read(body: Mapping[str, Any]) -> CompletionRequest:
    """What a client asks for.

    Raises:
        UsageError: a field has an invalid value; names it.
        BadGrammarError: the JSON schema or the grammar is broken.
    """
    fields = Fields(body)
    choice = _tool_choice(fields)
    request = AnswerRequest(
        messages=_messages(fields),
        limits=read_limits(fields, "max_completion_tokens", "max_tokens", "n_predict"),
        grammar=read_grammar_fields(fields),
        thinking=_thinking(fields),
        thinking_tokens=fields.whole("thinking_tokens", 0, MOST_TOKENS),
        stops_repeats=bool(fields.flag("stops_repeats")),
        logprobs=_logprobs(fields),
        salt=fields.text("cache_salt") or "",
        tools=checked_tools((tool(each, "parameters") for each in _functions(fields)), choice),
        tool_choice=choice,
        parallel_calls=fields.flag("parallel_tool_calls") is not False,
    )
    return asked(fields, request)


def _messages(fields: Fields) -> tuple[Message, ...]:
    """The conversation. Results of calls get the names of their tools, which some templates want."""
    names: dict[str, str] = {}
    messages: list[Message] = []
    for said in fields.objects("messages"):
        role = said.needed_text("role")
        calls = tuple(_call(each) for each in said.objects("tool_calls"))
        names.update((call.id, call.name) for call in calls)
        call_id = said.text("tool_call_id") or ""
        name = names.get(call_id, said.text("name") or "") if role == "tool" else ""
        text, pictures = content(said, "content")
        messages.append(Message(_ROLES.get(role, role), text, calls, call_id, name, pictures))
    if not messages:
        raise UsageError("messages is missing or empty")
    return tuple(messages)


def _call(fields: Fields) -> ToolCall:
    return tool_call(fields.text("id") or "", _function(fields))


def _function(fields: Fields) -> Fields:
    found = fields.object("function")
    if found is None:
        raise UsageError(f"{fields.name('function')} is missing")
    return found


def _functions(fields: Fields) -> Iterator[Fields]:
    """The tools that are functions; there are others, which need OpenAI's servers."""
    return (_function(each) for each in fields.objects("tools") if each.text("type") in (None, "function"))


def _tool_choice(fields: Fields) -> str:
    """Which tool has to be called, as AnswerRequest has it."""
    if isinstance(fields.data.get("tool_choice"), Mapping):
        return f"={tool_name(_function(Fields(fields.data['tool_choice'], fields.name('tool_choice'))))}"
    return fields.choice("tool_choice", "auto", "none", "required") or "auto"


def _thinking(fields: Fields) -> bool | None:
    """Whether a reasoning model thinks: OpenAI's reasoning_effort, or what other servers give the chat template."""
    if fields.text("reasoning_effort") == "none":
        return False
    given = fields.object("chat_template_kwargs")
    return None if given is None else given.flag("enable_thinking")


def _logprobs(fields: Fields) -> int | None:
    top = fields.whole("top_logprobs", 0, MOST_TOP_LOGPROBS)
    return (top or 0) if fields.flag("logprobs") else None


def writer(body: Mapping[str, Any], envelope: Envelope) -> ChatWriter:
    """What writes the answer to a body that read() took."""
    return ChatWriter(body, envelope)


class ChatWriter(CompletionWriter):
    """Writes chat completions and their chunks."""

    def __init__(self, body: Mapping[str, Any], envelope: Envelope) -> None:
        super().__init__(body, envelope)
        self._texts = [sse.TextEvent(self._chunk(index, {"content": sse.PLACE})) for index in range(len(self._answers))]

    def begin(self) -> bytes:
        """The role of each answer, which clients want to hear first."""
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self._answers)))

    def feed(self, part: Part) -> bytes:
        """See asked.Writer."""
        answer = self._answers[part.choice]
        answer.add(part)
        match part:
            case ResponseStarted():
                return b""
            case AnswerText(logprobs=()):
                return self._texts[part.choice].with_text(part.text)
            case AnswerText():
                return self._chunk(part.choice, {"content": part.text}, chosen=part.logprobs)
            case ReasoningText():
                return self._chunk(part.choice, {"reasoning_content": part.text})
            case CallStarted() | CallArguments():
                return self._chunk(part.choice, {"tool_calls": [_call_delta(part)]})
        return self._chunk(part.choice, {}, finish_reason=reason_of(answer))

    def end(self) -> bytes:
        """See asked.Writer."""
        return self._end("chat.completion.chunk")

    def whole(self) -> dict[str, Any]:
        """See asked.Writer."""
        choices = [
            {
                "index": index,
                "message": _message(answer),
                "logprobs": logprobs(answer.logprobs) if answer.logprobs else None,
                "finish_reason": reason_of(answer),
            }
            for index, answer in enumerate(self._answers)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        chosen: tuple[TokenLogprob, ...] = (),
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs(chosen) if chosen else None,
            "finish_reason": finish_reason,
        }
        data = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return sse.event({**data, "usage": None} if self._has_usage else data)


def _message(answer: AccumulatedAnswer) -> dict[str, Any]:
    """As OpenAI writes a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning.strip()
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return {**message, "refusal": None}


def _call_delta(part: CallStarted | CallArguments) -> dict[str, Any]:
    """What a stream says of a call."""
    if isinstance(part, CallStarted):
        function = {"name": part.name, "arguments": ""}
        return {"index": part.call, "id": part.id, "type": "function", "function": function}
    return {"index": part.call, "function": {"arguments": part.text}}

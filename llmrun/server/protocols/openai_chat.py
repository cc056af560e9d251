"""OpenAI's chat completions. Pure; see llmrun.server.answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from llmrun.errors import UsageError
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.messages import AnswerPart, AnswerRequest, Message, TokenLogprob, Tool, ToolCall
from llmrun.server.answer import PLACE, CompletionRequest, Envelope, TextEvent, sse_event
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai import (
    CompletionWriter,
    completion_of_several,
    content,
    error_body,
    finish_reason,
    logprobs,
)
from llmrun.server.protocols.options import (
    prefilled,
    read_grammar_fields,
    read_limits,
    read_logprobs,
    read_openrouter_reasoning,
)
from llmrun.server.protocols.stored_responses import CHAT
from llmrun.server.protocols.tools import checked_tools, complete_calls, tool, tool_call, tool_name

__all__ = ["error_body", "read", "writer"]

_ROLES = {"developer": "system"}


def read(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the request of a body.

    Raises:
        UsageError: a field has an invalid value; names it.
        BadGrammarError: the JSON schema or the grammar is invalid.
    """
    fields = Fields(body)
    choice, allowed = _tool_choice(fields)
    request = AnswerRequest(
        **_conversation(fields),
        limits=read_limits(fields, "max_completion_tokens", "max_tokens", "n_predict"),
        grammar=read_grammar_fields(fields),
        **read_openrouter_reasoning(fields),
        logprobs=read_logprobs(fields),
        tools=checked_tools((each for each in _tools(fields) if allowed is None or each.name in allowed), choice),
        tool_choice=choice,
        parallel_calls=fields.flag("parallel_tool_calls") is not False,
    )
    if fields.flag("store"):  # see kept_messages()
        fields.mapping("metadata")
    return completion_of_several(fields, request)


def _conversation(fields: Fields) -> dict[str, Any]:
    """Return the conversation; a last message of the assistant is continued, unless the client wants another one."""
    messages, continues = _messages(fields), fields.value("continue_final_message")
    if continues not in (None, True, False, "content", "reasoning_content"):  # the texts are llama-server's
        raise UsageError(f"{fields.name('continue_final_message')} must be true or false")
    new_message = fields.flag("add_generation_prompt")
    if continues and new_message:
        raise UsageError("add_generation_prompt and continue_final_message can't be used together")
    if continues and (messages[-1].role != "assistant" or messages[-1].tool_calls):
        why = "the last message is not a text of the assistant"
        raise UsageError("continue_final_message can't be used here", why=why)
    if continues is False or (continues is None and new_message):
        return {"messages": messages}
    return prefilled(messages, is_asked_for=bool(continues))


def _messages(fields: Fields) -> tuple[Message, ...]:
    """Return the conversation. Results of calls get the names of their tools, for templates that print them."""
    names: dict[str, str] = {}
    messages: list[Message] = []
    for message in fields.objects("messages"):
        role = message.needed_text("role")
        calls = tuple(_call(each) for each in message.objects("tool_calls"))
        names.update((call.id, call.name) for call in calls)
        call_id = message.text("tool_call_id") or ""
        name = names.get(call_id, message.text("name") or "") if role == "tool" else ""
        text, media = content(message, "content")
        reasoning = message.text("reasoning_content") or message.text("reasoning") or ""
        messages.append(Message(_ROLES.get(role, role), text, calls, call_id, name, media, reasoning))
    if not messages:
        raise UsageError("messages is missing or empty")
    return tuple(messages)


def _call(fields: Fields) -> ToolCall:
    fields.text("type")
    return tool_call(fields.text("id") or "", _function(fields))


def _function(fields: Fields) -> Fields:
    found = fields.object("function")
    if found is None:
        raise UsageError(f"{fields.name('function')} is missing")
    return found


def _tools(fields: Fields) -> Iterator[Tool]:
    """Yield the tools that are functions; all others need OpenAI's servers."""
    for each in fields.objects("tools"):
        if each.text("type") in (None, "function"):
            yield tool(_function(each), "parameters")
        else:
            each.ignore_all()


def _tool_choice(fields: Fields) -> tuple[str, frozenset[str] | None]:
    """Return AnswerRequest.tool_choice, and the names of the allowed tools; None allows all."""
    chosen = fields.object("tool_choice") if isinstance(fields.data.get("tool_choice"), Mapping) else None
    if chosen is None:
        return fields.choice("tool_choice", "auto", "none", "required") or "auto", None
    if chosen.text("type") == "allowed_tools":
        group = chosen.object("allowed_tools") or chosen
        names = frozenset(tool_name(_function(each)) for each in group.objects("tools"))
        return group.choice("mode", "auto", "required") or "auto", names
    if chosen.text("type") not in (None, "function"):
        why, hint = "only functions can be called here", "/v1/responses takes custom tools"
        raise UsageError(f"{chosen.name('type')} {chosen.text('type')!r} can't be used", why=why, hint=hint)
    return f"={tool_name(_function(chosen))}", None


class ChatWriter(CompletionWriter):
    """Writes chat completions and their chunks."""

    def __init__(self, body: Mapping[str, Any], envelope: Envelope) -> None:
        super().__init__(body, envelope)
        fields = Fields(body)
        self._kept = {"metadata": fields.mapping("metadata") or {}} if body.get("store") is True else {}
        indexes = range(len(self.answers))
        self._n_calls = [0] * len(self.answers)
        self._texts = [TextEvent(self._chunk(index, {"content": PLACE})) for index in indexes]
        self._reasoning = [TextEvent(self._chunk(index, {"reasoning_content": PLACE})) for index in indexes]

    def begin(self) -> bytes:
        """Return the role of each answer, which clients expect first."""
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self.answers)))

    def part(self, choice: int, part: AnswerPart) -> bytes:
        match part.kind:
            case "text" if not part.logprobs:
                return self._texts[choice].with_text(part.text)
            case "text":
                return self._chunk(choice, {"content": part.text}, part.logprobs)
            case "reasoning":
                return self._reasoning[choice].with_text(part.text)
            case "call":
                self._n_calls[choice] += 1
                function = {"name": part.text, "arguments": ""}
                return self._call_chunk(choice, {"id": part.call_id, "type": "function", "function": function})
            case "arguments":
                return self._call_chunk(choice, {"function": {"arguments": part.text}})
        return b""

    def finished(self, choice: int) -> bytes:
        more = {} if self._has_usage else self._timings(choice)
        return self._chunk(choice, {}, reason=finish_reason(self.answers[choice]), more=more)

    def end(self) -> bytes:
        return self._end("chat.completion.chunk")

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(answer),
                "logprobs": logprobs(answer.text_logprobs) if answer.text_logprobs else None,
                "finish_reason": finish_reason(answer),
            }
            for index, answer in enumerate(self.answers)
        ]
        body = {**self._head(CHAT), "choices": choices, "usage": self._usage()}
        return {**body, **self._kept, **self._timings(0)}

    def _empty_chunk(self, index: int, more: dict[str, Any]) -> bytes:
        return self._chunk(index, {}, more=more)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        tokens: tuple[TokenLogprob, ...] = (),
        reason: str | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs(tokens) if tokens else None,
            "finish_reason": reason,
        }
        data = {**self._head("chat.completion.chunk"), "choices": [choice], **more}
        return sse_event({**data, "usage": None} if self._has_usage else data)

    def _call_chunk(self, choice: int, delta: dict[str, Any]) -> bytes:
        return self._chunk(choice, {"tool_calls": [{"index": self._n_calls[choice] - 1, **delta}]})


writer = ChatWriter


def _message(answer: ResponseAccumulator) -> dict[str, Any]:
    calls = [call for call, _ in complete_calls(answer.all_calls)]
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if calls else "")}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning.strip()
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return {**message, "refusal": None}

"""OpenAI's Responses, which is all that Codex speaks. Pure; see llmrun.server.answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmrun.chat.truncation import WORDS_PER_TOKEN, summary_request
from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.arguments import MOST_TOP_LOGPROBS
from llmrun.protocol.messages import AnswerPart, AnswerRequest, Message, ToolCall
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.server.answer import AnswerWriter, CompletionRequest, Envelope, sse_event
from llmrun.server.protocols.fields import Fields, as_json
from llmrun.server.protocols.openai import content, error_body, logprobs
from llmrun.server.protocols.options import (
    compacted,
    completion_request,
    prefilled,
    read_grammar_fields,
    read_limits,
    read_openrouter_reasoning,
    read_sampling,
)
from llmrun.server.protocols.stored_responses import kept_items, listed_items
from llmrun.server.protocols.tools import (
    TEXT_ARGUMENT,
    ClientTool,
    checked_tools,
    client_tools,
    custom_input,
    flat_name,
    read_tools,
    tool_call,
)

__all__ = ["CompactionWriter", "error_body", "read", "read_compaction", "writer"]

_ROLES = {"developer": "system"}
_CALLS = frozenset({"function_call", "custom_tool_call"})
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})
_KINDS = frozenset({"function", "custom"})
_COMPACTION = "compaction"
_KEPT = "llmrun:"  # before the reasoning, or the summary, in a field that others encrypt
_SUMMARY_TOKENS = 1024  # of a compaction: longer than in a chat, since agents go on from it
_ECHOED = ("instructions", "previous_response_id", "prompt_cache_key", "safety_identifier")
"""Texts of a request that its response repeats, null if they are missing."""
_SETTINGS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_FIXED: Mapping[str, Any] = {
    "background": False, "max_tool_calls": None, "service_tier": "default", "truncation": "disabled",
}  # fmt: skip
"""Fields of a response that have one value here, whatever the client asks for."""
_CONTENTS = {"reasoning": "reasoning_text", "message": "output_text"}
"""Type of an item -> type of its content."""
_STATUSES = {"length": "incomplete", "cancelled": "cancelled"}
"""Reason of an answer's end -> status of its response; "completed" for all others."""


# ---- request


def read(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the request of a body, see ResponseStore.expanded(). Tools that are not the client's are ignored.

    Raises:
        UsageError, BadGrammarError: a field is invalid.
    """
    fields = Fields(body)
    for name in ("conversation", "prompt"):
        if fields.value(name) is not None:
            hint = "previous_response_id, or the whole conversation"
            raise UsageError(f"{name} can't be used", why="it is stored at OpenAI", hint=hint)
    choice, allowed = _tool_choice(fields)
    request = AnswerRequest(
        **prefilled(_messages(fields)),
        limits=read_limits(fields, "max_output_tokens"),
        grammar=read_grammar_fields(fields),
        **read_openrouter_reasoning(fields),
        logprobs=_logprobs(fields),
        tools=checked_tools((each for each in read_tools(fields) if allowed is None or each.name in allowed), choice),
        tool_choice=choice,
        parallel_calls=fields.flag("parallel_tool_calls") is not False,
    )
    fields.flag("store")  # see ResponseStore, as the next one
    fields.text("previous_response_id")
    return completion_request(fields, request)


def read_compaction(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the request for the summary of a conversation: the conversation as it was, and then the question.

    Raises:
        UsageError: a field is invalid.
    """
    fields = Fields(body)
    fields.needed_text("model")
    request = AnswerRequest(
        tuple(summary_request(_messages(fields), int(_SUMMARY_TOKENS * WORDS_PER_TOKEN))),
        limits=Limits(_SUMMARY_TOKENS),
        thinking=False,
        stops_repeats=True,
        salt=fields.text("cache_salt") or "",
    )
    fields.text("previous_response_id")  # see ResponseStore
    return completion_request(fields, request)._replace(stream=False)


def _messages(fields: Fields) -> tuple[Message, ...]:
    """Return the conversation; everything before the first message of another role is joined to one system prompt."""
    messages = [Message("system", fields.text("instructions") or "")]
    if isinstance(fields.value("input"), str):
        messages.append(Message("user", fields.needed_text("input")))
    else:
        names: dict[str, str] = {}
        for item in fields.objects("input"):
            _add(messages, item, names)
    first = next((index for index, message in enumerate(messages) if message.role != "system"), None)
    if first is None:
        raise UsageError("input is missing or empty")
    system = "\n\n".join(message.content for message in messages[:first] if message.content)
    said = (message for message in messages[first:] if not _has_only_reasoning(message))  # an interrupted answer
    return (*((Message("system", system),) if system else ()), *said)


def _add(messages: list[Message], item: Fields, names: dict[str, str]) -> None:
    """Add an item of the input. The model's text and the calls after it are several items, but one message."""
    kind = item.text("type") or "message"
    if kind in _CALLS:
        call = _call(item)
        names[call.id] = call.name
        if messages[-1].role != "assistant":
            messages.append(Message("assistant", ""))
        messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
    elif kind in _RESULTS:
        call_id = item.needed_text("call_id")
        text, media = content(item, "output")
        messages.append(Message("tool", text, (), call_id, names.get(call_id, ""), media))
    elif kind == "message":
        role = item.needed_text("role")
        text, media = content(item, "content")
        message = Message(_ROLES.get(role, role), text, media=media)
        if role == "assistant" and _has_only_reasoning(messages[-1]):
            message = replace(message, reasoning=messages.pop().reasoning)
        messages.append(message)
    elif kind == "reasoning":
        if reasoning := _reasoning(item):
            messages.append(Message("assistant", "", reasoning=reasoning))
    elif kind == _COMPACTION and (item.text("encrypted_content") or "").startswith(_KEPT):
        messages.append(compacted(item.needed_text("encrypted_content").removeprefix(_KEPT)))
    else:
        item.ignore_all()


def _has_only_reasoning(message: Message) -> bool:
    return bool(message.reasoning) and not (message.content or message.tool_calls)


def _reasoning(item: Fields) -> str:
    """Return the text of a reasoning item, or its summary; "" if it is encrypted by another server."""
    whole, summary = ([_part(part) for part in item.objects(key)] for key in ("content", "summary"))
    kept = item.text("encrypted_content") or ""
    return kept.removeprefix(_KEPT) if kept.startswith(_KEPT) and not whole else "\n\n".join(whole or summary)


def _part(part: Fields) -> str:
    part.text("type")  # reasoning_text or summary_text
    return part.needed_text("text")


def _call(item: Fields) -> ToolCall:
    call_id = item.needed_text("call_id")
    if item.text("type") == "function_call":
        return tool_call(call_id, item)._replace(name=flat_name(item))
    return ToolCall(call_id, flat_name(item), as_json({TEXT_ARGUMENT: item.text("input") or ""}))


def _tool_choice(fields: Fields) -> tuple[str, frozenset[str] | None]:
    """Return AnswerRequest.tool_choice, and the names of the allowed tools; None allows all."""
    chosen = fields.object("tool_choice") if isinstance(fields.data.get("tool_choice"), Mapping) else None
    if chosen is None:
        return fields.choice("tool_choice", "auto", "none", "required") or "auto", None
    kind = chosen.needed_text("type")
    if kind in _KINDS:
        return f"={flat_name(chosen)}", None
    if kind == "allowed_tools":
        allowed = [each for each in chosen.objects("tools") if each.text("type") in _KINDS]
        return chosen.choice("mode", "auto", "required") or "auto", frozenset(map(flat_name, allowed))
    return "auto", None


def _logprobs(fields: Fields) -> int | None:
    top = fields.whole("top_logprobs", 0, MOST_TOP_LOGPROBS)
    return top or 0 if top or "message.output_text.logprobs" in fields.texts("include") else None


# ---- answer


class ResponseWriter(AnswerWriter):
    """Writes a response, whose output is a sequence of items of reasoning, text and calls."""

    def __init__(self, body: Mapping[str, Any], envelope: Envelope) -> None:
        super().__init__()
        self._envelope, fields = envelope, Fields(body)
        given = read_sampling(fields)
        self._asked = AnswerRequest(
            sampling=SamplingParams(**{name: given[name] for name in _SETTINGS if name in given}),
            limits=read_limits(fields, "max_output_tokens"),
            **read_openrouter_reasoning(fields),
        )
        data = fields.data
        self._echoed = {
            **{name: data[name] if isinstance(data.get(name), str) else None for name in _ECHOED},
            **({"user": data["user"]} if "user" in data else {}),
            "metadata": data["metadata"] if isinstance(data.get("metadata"), Mapping) else {},
            "store": fields.flag("store") is not False,
            "parallel_tool_calls": fields.flag("parallel_tool_calls") is not False,
            "text": {"format": _text_format(fields)},
            "tool_choice": _used_choice(fields),
            "tools": [_described(each) for each in fields.objects("tools") if each.text("type") in _KINDS],
            "top_logprobs": _logprobs(fields) or 0,
        }
        self._completed_at: int | None = None
        self._keeps_reasoning = "reasoning.encrypted_content" in fields.texts("include")
        self._tools = client_tools(fields)
        self._output: list[dict[str, Any]] = []
        self._pieces: list[str] | None = None  # texts of the last item while it is open
        self._logprobs: list[dict[str, Any]] = []  # of its tokens
        self._n_events = 0

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def part(self, choice: int, part: AnswerPart) -> bytes:
        match part.kind:
            case "reasoning":
                return self._item("reasoning", {"summary": []}) + self._delta("response.reasoning_text", part.text)
            case "text":
                entries = logprobs(part.logprobs)["content"]
                data = self._item("message", {"role": "assistant"})
                self._logprobs += entries
                return data + self._delta("response.output_text", part.text, logprobs=entries)
            case "call":
                return self._close() + self._open(self._call(part))
            case "arguments" if self._output[-1]["type"] == "custom_tool_call":
                assert self._pieces is not None
                self._pieces.append(part.text)  # JSON, of which the client gets the text
                return b""
            case "arguments":
                return self._delta("response.function_call_arguments", part.text)
        return b""

    def finished(self, choice: int) -> bytes:
        is_complete = self._status == "completed"
        self._completed_at = int(time.time()) if is_complete else None
        return self._close("completed" if is_complete else "incomplete")

    @property
    def _status(self) -> str:
        """The status at the end of the answer."""
        return _STATUSES.get(self.answers[0].reason, "completed")

    def end(self) -> bytes:
        response = self.whole()
        kind = "completed" if response["status"] == "completed" else "incomplete"  # no event is called "cancelled"
        return self._event(f"response.{kind}", response=response)

    def error(self, error: LlmrunError) -> bytes:
        details = error_body(error, error.http_status)["error"]
        response = self._response("failed") | {"error": {"code": details["code"], "message": details["message"]}}
        return self._event("response.failed", response=response)

    def whole(self) -> dict[str, Any]:
        status = self._status
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status) | {"incomplete_details": details, "usage": _usage(self.answers[0])}

    def _response(self, status: str) -> dict[str, Any]:
        """Return a response with every field that OpenResponses requires; its settings are the ones in use."""
        asked = self.requests.get(0, self._asked)
        return {
            "id": self._envelope.id,
            "object": "response",
            "created_at": self._envelope.created,
            "completed_at": self._completed_at,
            "status": status,
            "model": self._envelope.model,
            "output": self._output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **{name: getattr(asked.sampling, name) for name in _SETTINGS},
            "max_output_tokens": asked.limits.max_tokens,
            "reasoning": {"effort": asked.reasoning_effort, "summary": None},
            **_FIXED,
            **self._echoed,
        }

    def _item(self, kind: str, item: dict[str, Any]) -> bytes:
        """Open an item of a type, unless it is open; close the one before."""
        if self._pieces is not None and self._output[-1]["type"] == kind:
            return b""
        data = self._close() + self._open({"type": kind, **item, "content": []})
        return data + self._event("response.content_part.added", **self._place(), part=self._part(""))

    def _open(self, item: dict[str, Any]) -> bytes:
        self._pieces, self._logprobs = [], []
        name = f"{item['type']}_{len(self._output)}_{self._envelope.id}"
        self._output.append({"id": name, "status": "in_progress", **item})
        index = len(self._output) - 1
        return self._event("response.output_item.added", output_index=index, item=self._output[-1])

    def _delta(self, kind: str, text: str, **more: Any) -> bytes:
        assert self._pieces is not None, "text outside of an item"
        self._pieces.append(text)
        return self._event(f"{kind}.delta", **self._place(), delta=text, **more)

    def _close(self, status: str = "completed") -> bytes:
        if self._pieces is None:
            return b""
        item, text = self._output[-1], "".join(self._pieces)
        item["status"] = status
        if item["type"] in _CONTENTS:
            data = self._close_content(item, text)
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input(text)
            kind, place = "response.custom_tool_call_input", self._place()
            data = self._event(f"{kind}.delta", **place, delta=item["input"])
            data += self._event(f"{kind}.done", **place, input=item["input"])
        else:
            item["arguments"] = text
            done = "response.function_call_arguments.done"
            data = self._event(done, **self._place(), name=item["name"], arguments=text)
        self._pieces = None
        index = len(self._output) - 1
        return data + self._event("response.output_item.done", output_index=index, item=item)

    def _call(self, part: AnswerPart) -> dict[str, Any]:
        """Return the item of a call with the client's name of the tool."""
        tool = self._tools.get(part.text, ClientTool(part.text))
        namespace = {"namespace": tool.namespace} if tool.namespace else {}
        kind, content = ("custom_tool_call", "input") if tool.is_custom else ("function_call", "arguments")
        return {"type": kind, "call_id": part.call_id, "name": tool.name, **namespace, content: ""}

    def _close_content(self, item: dict[str, Any], text: str) -> bytes:
        part = self._part(text)
        item["content"] = [part]
        if item["type"] == "reasoning" and self._keeps_reasoning:
            item["encrypted_content"] = _KEPT + text
        more = {"logprobs": self._logprobs} if item["type"] == "message" else {}
        data = self._event(f"response.{_CONTENTS[item['type']]}.done", **self._place(), text=text, **more)
        return data + self._event("response.content_part.done", **self._place(), part=part)

    def _part(self, text: str) -> dict[str, Any]:
        kind = self._output[-1]["type"]
        more = {"annotations": [], "logprobs": self._logprobs} if kind == "message" else {}
        return {"type": _CONTENTS[kind], "text": text, **more}

    def _place(self) -> dict[str, Any]:
        item = self._output[-1]
        inside = {"content_index": 0} if item["type"] in _CONTENTS else {}
        return {"item_id": item["id"], "output_index": len(self._output) - 1, **inside}

    def _event(self, kind: str, **data: Any) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        return sse_event({"type": kind, "sequence_number": number, **data}, kind)


writer = ResponseWriter


class CompactionWriter(AnswerWriter):
    """Writes what stands for a conversation from now on: the messages of the user, and a summary as one item.

    It is never streamed.
    """

    def __init__(self, body: Mapping[str, Any], envelope: Envelope) -> None:
        super().__init__()
        self._envelope = envelope
        items = listed_items(envelope.id, kept_items({**body, "store": True}) or ())
        self._said = [item for item in items if item["type"] == "message" and item["role"] == "user"]

    def part(self, choice: int, part: AnswerPart) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def error(self, error: LlmrunError) -> bytes:
        return b""

    def whole(self) -> dict[str, Any]:
        (answer,) = self.answers
        summary = _KEPT + answer.text.strip()
        item = {"id": f"cmp_{self._envelope.id}", "type": _COMPACTION, "encrypted_content": summary}
        return {
            "id": self._envelope.id,
            "object": "response.compaction",
            "created_at": self._envelope.created,
            "output": [*self._said, item],
            "usage": _usage(answer),
        }


def _text_format(fields: Fields) -> dict[str, Any]:
    """Return the format of the text, see read_grammar_fields()."""
    found = (fields.mapping("text") or {}).get("format") or {}
    kind = (found.get("type") or "text") if isinstance(found, Mapping) else "json_object"
    if kind in ("text", "json_object"):
        return {"type": kind}
    given = found if kind == "json_schema" else {"type": "json_schema", "schema": found}  # a bare schema
    return {"name": "", "description": None, "strict": False, **given}


def _used_choice(fields: Fields) -> Any:
    """Return the client's tool_choice; "auto" for a tool of OpenAI's servers."""
    choice = fields.data.get("tool_choice") or "auto"
    if isinstance(choice, Mapping) and choice["type"] == "allowed_tools":
        return {"mode": "auto", **choice}
    return choice if isinstance(choice, str) or choice["type"] in _KINDS else "auto"


def _described(tool: Fields) -> Mapping[str, Any]:
    if tool.text("type") != "function":
        return tool.data
    return {"description": None, "parameters": None, "strict": None, **tool.data}


def _usage(answer: ResponseAccumulator) -> dict[str, Any]:
    prompt, cached = (answer.started.prompt_tokens, answer.started.reused_tokens) if answer.started else (0, 0)
    completion = answer.stats.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": prompt + completion,
    }

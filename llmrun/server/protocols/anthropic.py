"""Anthropic's protocol: /v1/messages and /v1/messages/count_tokens, as Claude Code speaks it.

Pure; see llmrun.server.answer_parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from llmrun.errors import ContextOverflowError, LlmrunError, UsageError
from llmrun.grammar import Grammar
from llmrun.protocol.messages import AnswerRequest, Image, Message, Stats, ToolCall
from llmrun.protocol.params import MOST_TOKENS, Limits
from llmrun.server.answer_parts import (
    AccumulatedAnswer,
    AnswerText,
    CallArguments,
    CallStarted,
    CompletionRequest,
    Envelope,
    Part,
    ReasoningText,
    ResponseFinished,
    ResponseStarted,
    Writer,
)
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.images import image_from_base64
from llmrun.server.protocols.sampling import read_drafts, read_sampling, schema_grammar
from llmrun.server.protocols.tools import as_json, call_arguments, checked_tools, refuse_media, tool, tool_name
from llmrun.server.sse import EVENT_STREAM, event

# Claude Code's first line of the system prompt: it differs in every request, and no prefix would ever be shared.
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_MEDIA = frozenset({"document", "audio", "container_upload"})
_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


# ---- what is asked


def read(body: Mapping[str, Any]) -> CompletionRequest:
    """What a client asks for.

    Raises:
        UsageError, BadGrammarError: a field is invalid.
    """
    asked = read_count(body)
    if asked.request.messages[-1].role == "assistant":
        raise UsageError("the last message is the assistant's", why="the beginning of an answer can't be given")
    return asked


def read_count(body: Mapping[str, Any]) -> CompletionRequest:
    """The conversation whose tokens are to be counted.

    Raises:
        UsageError, BadGrammarError: a field is invalid.
    """
    fields = Fields(body)
    thinking, budget = _thinking(fields)
    choice, parallel = _tool_choice(fields)
    request = AnswerRequest(
        messages=(*_system(fields), *_messages(fields)),
        limits=Limits(fields.whole("max_tokens", 1, MOST_TOKENS), fields.texts("stop_sequences")),
        grammar=_format(fields),
        thinking=thinking,
        thinking_tokens=budget,
        tools=checked_tools((tool(each, "input_schema") for each in _functions(fields)), choice),
        tool_choice=choice,
        parallel_calls=parallel,
    )
    return CompletionRequest(
        fields.text("model") or "",
        request,
        read_sampling(fields),
        stream=fields.flag("stream") is True,
        speculate=read_drafts(fields),
    )


def counted(tokens: int) -> dict[str, Any]:
    """The body of count_tokens."""
    return {"input_tokens": tokens}


def _system(fields: Fields) -> Iterable[Message]:
    text = _BILLING.sub("", _text(fields, "system"))
    return (Message("system", text),) if text else ()


def _messages(fields: Fields) -> list[Message]:
    messages: list[Message] = []
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    for said in fields.objects("messages"):
        role = said.needed_text("role")
        if role == "assistant":
            messages.append(_assistant(said))
            names.update((made.id, made.name) for made in messages[-1].tool_calls)
        else:
            messages += _user(said, role, names)
    if not messages:
        raise UsageError("messages is missing or empty")
    return messages


def _assistant(said: Fields) -> Message:
    """Its earlier thoughts are left out, as chat templates do."""
    calls = tuple(
        ToolCall(block.text("id") or "", tool_name(block), as_json(dict((block.object("input") or Fields({})).data)))
        for block in _blocks(said, "content")
        if block.text("type") == "tool_use"
    )
    return Message("assistant", _text(said, "content"), calls)


def _user(said: Fields, role: str, names: Mapping[str, str]) -> list[Message]:
    """Results of calls, and what is said besides."""
    results = [_result(block, names) for block in _blocks(said, "content") if block.text("type") == "tool_result"]
    text, pictures = _text(said, "content"), _pictures(said)
    return [*results, Message(role, text, pictures=pictures)] if text or pictures or not results else results


def _pictures(said: Fields) -> tuple[Image, ...]:
    """Those that stand between the texts of a message."""
    found: list[Image] = []
    at = 0
    for block in _blocks(said, "content"):
        if block.text("type") == "text":
            at += len(block.needed_text("text")) + 1  # and a newline
        elif block.text("type") == "image":
            source = block.object("source") or Fields({}, block.name("source"))
            source.choice("type", "base64")  # nothing is fetched
            found.append(image_from_base64(source.needed_text("data"), source.name("data"), at))
    return tuple(found)


def _result(block: Fields, names: Mapping[str, str]) -> Message:
    call_id = block.needed_text("tool_use_id")
    text = _text(block, "content")
    if pictures := _pictures(block):
        refuse_media(pictures[0].name)
    text = f"Error: {text}" if block.flag("is_error") else text
    return Message("tool", text, tool_call_id=call_id, name=names.get(call_id, ""))


def _text(fields: Fields, key: str) -> str:
    """A content's text: a string, or blocks."""
    value = fields.data.get(key)
    if isinstance(value, str):
        return value
    return "\n".join(block.needed_text("text") for block in _blocks(fields, key) if block.text("type") == "text")


def _blocks(fields: Fields, key: str) -> list[Fields]:
    if isinstance(fields.data.get(key), str):
        return []
    blocks = list(fields.objects(key))
    for block in blocks:
        if block.needed_text("type") in _MEDIA:
            refuse_media(f"{block.name('type')} {block.text('type')!r}")
    return blocks


def _functions(fields: Fields) -> Iterable[Fields]:
    """The client's own tools; those of Anthropic's servers have types of their own."""
    return (each for each in fields.objects("tools") if each.text("type") in (None, "custom"))


def _tool_choice(fields: Fields) -> tuple[str, bool]:
    """Which tools have to be called, and whether several at once may be."""
    chosen = fields.object("tool_choice") or Fields({"type": "auto"})
    kind = chosen.choice("type", "tool", *_CHOICES) or "auto"
    choice = f"={tool_name(chosen)}" if kind == "tool" else _CHOICES[kind]
    return choice, not chosen.flag("disable_parallel_tool_use")


def _thinking(fields: Fields) -> tuple[bool | None, int | None]:
    """Whether the model thinks, and in how many tokens."""
    config = fields.object("thinking")
    if config is None:
        return None, None
    kind = config.needed_text("type")
    wanted = {"enabled": True, "disabled": False}.get(kind)  # others leave it to the model
    return wanted, config.whole("budget_tokens", 0, MOST_TOKENS)


def _format(fields: Fields) -> Grammar | None:
    config = fields.object("output_config")
    wanted = config.object("format") if config is not None else None
    wanted = wanted or fields.object("output_format")
    if wanted is None:
        return None
    wanted.choice("type", "json_schema")
    return schema_grammar(wanted.data.get("schema", {}))


# ---- what is answered


def writer(body: Mapping[str, Any], envelope: Envelope) -> Writer:
    """What writes the answer to a body that read() took."""
    return _Writer(envelope)


def error_body(error: LlmrunError, status: int) -> dict[str, Any]:
    """An error as Anthropic's clients expect it."""
    message = f"{error}; {error.hint}" if error.hint else str(error)
    if isinstance(error, ContextOverflowError):
        message = f"prompt is too long: {message}"  # Claude Code looks for these words, and makes it shorter
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": error.code}}


class _Writer:
    """Writes a message, whose content is blocks of thoughts, text and calls, one after the other."""

    media_type = EVENT_STREAM

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._answer = AccumulatedAnswer()
        self._n_blocks = 0
        self._open = ""  # the type of the block that is not ended yet

    def begin(self) -> bytes:
        """See Writer: message_start has to say how many tokens the prompt has, so that it can't come yet."""
        return _event("ping")

    def feed(self, part: Part) -> bytes:
        """See Writer."""
        self._answer.add(part)
        match part:
            case ResponseStarted():
                return _event("message_start", message=self._message([], _usage(part, Stats())))
            case ReasoningText():
                written = self._within("thinking", {"thinking": "", "signature": ""})
                return written + self._delta("thinking_delta", thinking=part.text)
            case AnswerText():
                return self._within("text", {"text": ""}) + self._delta("text_delta", text=part.text)
            case CallStarted():
                return self._close() + self._within("tool_use", {"id": part.id, "name": part.name, "input": {}})
            case CallArguments():
                return self._delta("input_json_delta", partial_json=part.text)
            case ResponseFinished():
                return self._close()

    def end(self) -> bytes:
        """See Writer."""
        usage = _usage(self._answer.started, self._stats)
        return _event("message_delta", delta=self._stop(), usage=usage) + _event("message_stop")

    def error(self, error: LlmrunError) -> bytes:
        """See Writer."""
        return event(error_body(error, error.http_status), "error")

    def whole(self) -> dict[str, Any]:
        """See Writer."""
        answer = self._answer
        blocks: list[dict[str, Any]] = []
        if answer.reasoning:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text:
            blocks.append({"type": "text", "text": answer.text})
        blocks += [
            {"type": "tool_use", "id": made.id, "name": made.name, "input": arguments}
            for made in answer.calls
            if (arguments := call_arguments(made)) is not None
        ]
        return self._message(blocks, _usage(answer.started, self._stats)) | self._stop()

    @property
    def _stats(self) -> Stats:
        return self._answer.finished.stats if self._answer.finished else Stats()

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._envelope.id,
            "type": "message",
            "role": "assistant",
            "model": self._envelope.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _stop(self) -> dict[str, Any]:
        ended = self._answer.finished
        reasons = {"stop_string": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
        reason = reasons.get(ended.reason, "end_turn") if ended else "end_turn"
        return {"stop_reason": reason, "stop_sequence": (ended.stop if ended else "") or None}

    def _within(self, kind: str, content: dict[str, Any]) -> bytes:
        """Begin a block of a type, if it is not begun."""
        if self._open == kind:
            return b""
        written = self._close()
        self._open = kind
        block = {"type": kind, **content}
        return written + _event("content_block_start", index=self._n_blocks, content_block=block)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        self._n_blocks += 1
        return _event("content_block_stop", index=self._n_blocks - 1)

    def _delta(self, kind: str, **content: str) -> bytes:
        return _event("content_block_delta", index=self._n_blocks, delta={"type": kind, **content})


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def _usage(begun: ResponseStarted | None, stats: Stats) -> dict[str, Any]:
    """Cached tokens are not among the input tokens here."""
    prompt, cached = (begun.prompt_tokens, begun.cached_tokens) if begun else (0, 0)
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": stats.completion_tokens,
    }

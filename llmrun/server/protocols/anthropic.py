"""Anthropic's protocol: /v1/messages and /v1/messages/count_tokens, as Claude Code uses it.

Pure; see llmrun.server.answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from llmrun.errors import ContextOverflowError, LlmrunError, UsageError
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.media import Media
from llmrun.protocol.messages import AnswerPart, AnswerRequest, Message
from llmrun.protocol.params import MOST_TOKENS, Limits
from llmrun.server.answer import PLACE, AnswerWriter, CompletionRequest, Envelope, TextEvent, sse_event
from llmrun.server.protocols.attachments import anthropic_document, media_from_base64, refuse_media
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.options import (
    compacted,
    completion_request,
    prefilled,
    read_effort,
    read_grammar_fields,
    read_reasoning,
    read_stop,
    signature,
)
from llmrun.server.protocols.tools import checked_tools, complete_calls, tool, tool_call, tool_name

# The first line of Claude Code's system prompt: it differs in every request, so that no prefix could be shared.
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_MEDIA = frozenset({"audio", "container_upload"})
_COMPACTION = "compaction"
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


# ---- request


def read(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the request of a body.

    Raises:
        UsageError, BadGrammarError: a field is invalid.
    """
    completion = read_count(body)
    if completion.request.limits.max_tokens is None:
        raise UsageError("max_tokens is missing", why="this protocol requires it")
    if completion.request.messages[-1].role == "assistant":
        has_calls = bool(completion.request.messages[-1].tool_calls)
        why = "the results of its calls are missing" if has_calls else "there is no message before it"
        raise UsageError("the last message is the assistant's", why=why)
    return completion


def read_count(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the request of a body whose tokens are counted.

    Raises:
        UsageError, BadGrammarError: a field is invalid.
    """
    fields = Fields(body)
    thinking, effort, budget = _thinking(fields)
    choice, parallel = _tool_choice(fields)
    request = AnswerRequest(
        **prefilled((*_system(fields), *_messages(fields))),
        limits=Limits(fields.whole("max_tokens", 1, MOST_TOKENS), read_stop(fields, "stop_sequences")),
        grammar=read_grammar_fields(fields),
        **{**read_reasoning(fields, effort, thinking), **({} if budget is None else {"thinking_tokens": budget})},
        tools=checked_tools((tool(each, "input_schema") for each in _functions(fields)), choice),
        tool_choice=choice,
        parallel_calls=parallel,
    )
    return completion_request(fields, request)


def _system(fields: Fields) -> Iterable[Message]:
    text = _BILLING.sub("", _text(fields, "system"))
    return (Message("system", text),) if text else ()


def _messages(fields: Fields) -> list[Message]:
    messages: list[Message] = []
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    for message in fields.objects("messages"):
        role = message.needed_text("role")
        if role == "assistant":
            if (summary := _summary(message)) is not None:
                messages = [compacted(summary)]
            messages.append(_assistant(message))
            names.update((call.id, call.name) for call in messages[-1].tool_calls)
        else:
            messages += _user(message, role, names)
    if not messages:
        raise UsageError("messages is missing or empty")
    return messages


def _summary(message: Fields) -> str | None:
    """Return the summary that stands for the conversation before it; None without a compaction."""
    texts = (block.text("content") for block in _blocks(message, "content") if block.text("type") == _COMPACTION)
    return next((text for text in reversed(list(texts)) if text), None)


def _assistant(message: Fields) -> Message:
    """Return a message of the model. Reasoning that another server has redacted is left out."""
    blocks = _blocks(message, "content")
    ends = [index for index, block in enumerate(blocks) if block.text("type") == _COMPACTION and block.text("content")]
    blocks = blocks[ends[-1] + 1 :] if ends else blocks
    thoughts = (block.needed_text("thinking") for block in blocks if block.text("type") == "thinking")
    calls = tuple(
        tool_call(block.text("id") or "", block, "input") for block in blocks if block.text("type") == "tool_use"
    )
    text = _text(message, "content")
    text = _joined(blocks) if ends else text
    return Message("assistant", text, calls, reasoning="\n".join(thoughts))


def _user(message: Fields, role: str, names: Mapping[str, str]) -> list[Message]:
    """Return the results of calls, and a message with the rest."""
    results = [_result(block, names) for block in _blocks(message, "content") if block.text("type") == "tool_result"]
    text, images = _text(message, "content"), _images(message)
    return [*results, Message(role, text, media=images)] if text or images or not results else results


def _images(message: Fields) -> tuple[Media, ...]:
    found: list[Media] = []
    at = 0
    for block in _blocks(message, "content"):
        if (text := _block_text(block)) is not None:
            at += len(text) + 1  # and a newline
        elif block.text("type") == "image":
            source = block.object("source") or Fields({}, block.name("source"))
            source.choice("type", "base64")  # a URL is never fetched
            found.append(media_from_base64(source.needed_text("data"), source.name("data"), at, "image"))
    return tuple(found)


def _result(block: Fields, names: Mapping[str, str]) -> Message:
    call_id = block.needed_text("tool_use_id")
    start = "Error: " if block.flag("is_error") else ""
    images = tuple(image._replace(at=image.at + len(start)) for image in _images(block))
    text = start + _text(block, "content")
    return Message("tool", text, tool_call_id=call_id, name=names.get(call_id, ""), media=images)


def _text(fields: Fields, key: str) -> str:
    """Return the text of a content: a string, or blocks."""
    value = fields.value(key)
    if isinstance(value, str):
        return value
    return _joined(_blocks(fields, key))


def _joined(blocks: Iterable[Fields]) -> str:
    return "\n".join(text for block in blocks if (text := _block_text(block)) is not None)


def _block_text(block: Fields) -> str | None:
    """Return the text of a block of text, a document or a search result; None for other blocks."""
    kind = block.text("type")
    if kind == "document":
        return anthropic_document(block)
    if kind == "search_result":
        texts = [block.text("title") or "", block.text("source") or "", _text(block, "content")]
        return "\n".join(filter(None, texts))
    return block.needed_text("text") if kind == "text" else None


def _blocks(fields: Fields, key: str) -> list[Fields]:
    if isinstance(fields.value(key), str):
        return []
    blocks = list(fields.objects(key))
    for block in blocks:
        if block.needed_text("type") in _MEDIA:
            refuse_media(f"{block.name('type')} {block.text('type')!r}")
    return blocks


def _functions(fields: Fields) -> Iterable[Fields]:
    """Yield the client's own tools; tools of Anthropic's servers have other types."""
    for each in fields.objects("tools"):
        if each.text("type") in (None, "custom"):
            yield each
        else:
            each.ignore_all()


def _tool_choice(fields: Fields) -> tuple[str, bool]:
    """Return AnswerRequest.tool_choice, and whether parallel calls are allowed."""
    chosen = fields.object("tool_choice") or Fields({"type": "auto"})
    kind = chosen.choice("type", "tool", *_CHOICES) or "auto"
    choice = f"={tool_name(chosen)}" if kind == "tool" else _CHOICES[kind]
    return choice, not chosen.flag("disable_parallel_tool_use")


def _thinking(fields: Fields) -> tuple[bool | None, str | None, int | None]:
    """Return whether the model reasons, its effort, and the limit of its reasoning in tokens."""
    output, config = fields.object("output_config"), fields.object("thinking")
    effort = read_effort(output, "effort") if output is not None else None
    if config is None:
        return None, effort, None
    kind = config.needed_text("type")
    is_enabled = {"enabled": True, "disabled": False}.get(kind)  # others leave it to the model
    return is_enabled, effort, config.whole("budget_tokens", 0, MOST_TOKENS)


# ---- answer


def error_body(error: LlmrunError, status: int) -> dict[str, Any]:
    message = f"{error}; {error.hint}" if error.hint else str(error)
    if isinstance(error, ContextOverflowError):
        if error.size is not None:
            message = f"{error.size[0]} tokens > {error.size[1]} maximum"
        message = f"prompt is too long: {message}"  # Claude Code looks for these words, and shortens it
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": error.code}}


class MessageWriter(AnswerWriter):
    """Writes a message, whose content is a sequence of blocks of reasoning, text and calls."""

    def __init__(self, body: Mapping[str, Any], envelope: Envelope) -> None:
        super().__init__()
        self._envelope, self._answer = envelope, self.answers[0]
        self._n_blocks = 0
        self._open = ""  # type of the open block
        self._delta = TextEvent(f'"{PLACE}"'.encode())  # of that block

    def begin(self) -> bytes:
        """Return a ping: message_start needs the number of prompt tokens, which is not known yet."""
        return _event("ping")

    def started(self, choice: int) -> bytes:
        return _event("message_start", message=self._message([]))

    def part(self, choice: int, part: AnswerPart) -> bytes:
        match part.kind:
            case "reasoning":
                return self._block("thinking", {"thinking": "", "signature": ""}) + self._delta.with_text(part.text)
            case "text":
                return self._block("text", {"text": ""}) + self._delta.with_text(part.text)
            case "call":
                return self._close() + self._block("tool_use", {"id": part.call_id, "name": part.text, "input": {}})
            case "arguments":
                return self._delta.with_text(part.text)
        return b""

    def finished(self, choice: int) -> bytes:
        return self._close()

    def end(self) -> bytes:
        return _event("message_delta", delta=self._stop(), usage=_usage(self._answer)) + _event("message_stop")

    def error(self, error: LlmrunError) -> bytes:
        return sse_event(error_body(error, error.http_status), "error")

    def whole(self) -> dict[str, Any]:
        answer = self._answer
        blocks: list[dict[str, Any]] = []
        if answer.reasoning:
            signed = {"thinking": answer.reasoning, "signature": signature(answer.reasoning)}
            blocks.append({"type": "thinking", **signed})
        if answer.text:
            blocks.append({"type": "text", "text": answer.text})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
            for call, arguments in complete_calls(answer.all_calls)
        ]
        return self._message(blocks) | self._stop()

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._envelope.id,
            "type": "message",
            "role": "assistant",
            "model": self._envelope.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._answer),
        }

    def _stop(self) -> dict[str, Any]:
        reasons = {"stop_string": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
        reason = reasons.get(self._answer.reason, "end_turn")
        return {"stop_reason": reason, "stop_sequence": self._answer.stop or None}

    def _block(self, kind: str, content: dict[str, Any]) -> bytes:
        """Open a block of a type, unless it is open; close the one before."""
        if self._open == kind:
            return b""
        data = self._close()
        self._open = kind
        delta = {"type": _DELTAS[kind][0], _DELTAS[kind][1]: PLACE}
        self._delta = TextEvent(_event("content_block_delta", index=self._n_blocks, delta=delta))
        block = {"type": kind, **content}
        return data + _event("content_block_start", index=self._n_blocks, content_block=block)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        index, data = self._n_blocks, b""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": signature(self._answer.reasoning)}
            data = _event("content_block_delta", index=index, delta=delta)
        self._open = ""
        self._n_blocks += 1
        return data + _event("content_block_stop", index=index)


writer = MessageWriter


def _event(kind: str, **data: Any) -> bytes:
    return sse_event({"type": kind, **data}, kind)


def _usage(answer: ResponseAccumulator) -> dict[str, Any]:
    prompt, cached = (answer.started.prompt_tokens, answer.started.reused_tokens) if answer.started else (0, 0)
    return {
        "input_tokens": prompt - cached,  # unlike in OpenAI's protocol
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.stats.completion_tokens,
    }

"""Ollama's protocol: /api/chat and /api/generate. Pure; see llmrun.server.answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.media import Media
from llmrun.protocol.messages import AnswerPart, AnswerRequest, Message, TokenLogprob, Tool, ToolCall
from llmrun.protocol.params import MOST_TOKENS, Limits
from llmrun.server.answer import NDJSON, PLACE, AnswerWriter, CompletionRequest, Envelope, TextEvent, json_line
from llmrun.server.protocols.attachments import media_from_base64
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.models import unix_time
from llmrun.server.protocols.options import (
    prefilled,
    read_drafts,
    read_effort,
    read_grammar_fields,
    read_keep_seconds,
    read_logprobs,
    read_reasoning,
    read_sampling,
    read_stop,
)
from llmrun.server.protocols.tools import checked_tools, complete_calls, tool, tool_call

_MOST_CONTEXT = 2**27


# ---- request


def read_chat(body: Mapping[str, Any]) -> CompletionRequest:
    """Return a request to /api/chat. Without messages it only loads the model, or unloads it if keep_alive is 0.

    Raises:
        UsageError, BadGrammarError: a field is invalid.
    """
    fields = Fields(body)
    messages = tuple(_message(item) for item in fields.objects("messages"))
    tools = checked_tools(map(_tool, fields.objects("tools")), "auto")
    request = AnswerRequest(**prefilled(messages), tools=tools) if messages else AnswerRequest(tools=tools)
    return _completion_request(fields, request)


def read_generate(body: Mapping[str, Any]) -> CompletionRequest:
    """Return a request to /api/generate. Without a prompt it only loads the model, or unloads it if keep_alive is 0.

    Raises:
        UsageError, BadGrammarError: a field is invalid.
    """
    fields = Fields(body)
    prompt, system = fields.text("prompt") or "", fields.text("system") or ""
    if fields.text("template"):
        raise UsageError("template can't be used", why="Go templates are not read", hint="use raw: true")
    images, suffix = _images(fields), fields.text("suffix")
    if suffix and not images:
        return _completion_request(fields, AnswerRequest(prompt=prompt, suffix=suffix))
    if not prompt and not images:
        return _completion_request(fields, AnswerRequest())
    if fields.flag("raw"):
        if images:
            raise UsageError("raw and images can't be used together", why="an image needs a chat template around it")
        return _completion_request(fields, AnswerRequest(prompt=prompt))
    first = (Message("system", system),) if system else ()
    return _completion_request(fields, AnswerRequest((*first, Message("user", prompt, media=images))))


def _completion_request(fields: Fields, request: AnswerRequest) -> CompletionRequest:
    options = fields.object("options") or Fields({}, "options")
    options.whole("num_ctx", 1, _MOST_CONTEXT)
    options.ignore("num_ctx")  # many clients always send one; the context window is the server's --ctx
    max_tokens = options.whole("num_predict", -2, MOST_TOKENS) or 0  # -1 and -2: no limit
    return CompletionRequest(
        model=fields.text("model") or fields.text("name") or "",
        request=replace(
            request,
            limits=Limits(max_tokens if max_tokens > 0 else None, read_stop(options, "stop")),
            grammar=read_grammar_fields(fields),
            **_thinking(fields),
            logprobs=read_logprobs(fields),
        ),
        sampling=read_sampling(options),
        stream=fields.flag("stream") is not False,
        keep_seconds=read_keep_seconds(fields),
        speculate=read_drafts(options),
        ignored=fields.ignored,
    )


def _message(fields: Fields) -> Message:
    calls = tuple(
        tool_call(call.text("id") or "", call.object("function") or call) for call in fields.objects("tool_calls")
    )
    name = fields.text("tool_name") or fields.text("name") or ""
    role, call_id = fields.needed_text("role"), fields.text("tool_call_id") or ""
    content, reasoning = fields.text("content") or "", fields.text("thinking") or ""
    return Message(role, content, calls, call_id, name, _images(fields), reasoning)


def _images(fields: Fields) -> tuple[Media, ...]:
    """Return the images, all before the text. Ollama has no other place for audio."""
    given, name = fields.texts("images"), fields.name("images")
    return tuple(media_from_base64(data, f"{name}[{index}]", 0, "image", "audio") for index, data in enumerate(given))


def _tool(fields: Fields) -> Tool:
    fields.choice("type", "function")
    return tool(fields.object("function") or fields, "parameters")


def _thinking(fields: Fields) -> dict[str, Any]:
    if isinstance(fields.value("think"), str):
        return read_reasoning(fields, read_effort(fields, "think"))  # for newer models
    return read_reasoning(fields, thinking=fields.flag("think"))


# ---- answer


class _Piece(NamedTuple):
    """The content of one line, or a whole answer."""

    text: str = ""
    thinking: str = ""
    calls: Sequence[ToolCall] = ()
    logprobs: Sequence[TokenLogprob] = ()


class LineWriter(AnswerWriter):
    """Writes an answer as lines of JSON.

    The arguments of a tool call are an object, so that a call is written once it is complete.

    Args:
        shape: returns a piece in the form of /api/chat or /api/generate.
    """

    media_type = NDJSON

    def __init__(self, shape: Callable[[_Piece], dict[str, Any]], body: Mapping[str, Any], envelope: Envelope) -> None:
        super().__init__()
        self._reason = "unload" if read_keep_seconds(Fields(body)) == 0 else "load"  # without an answer
        self._head = {"model": envelope.model, "created_at": unix_time(envelope.created)}
        self._shape = shape
        self._n_calls = 0  # already written
        self._text = TextEvent(self._line(_Piece(text=PLACE)))
        self._thinking = TextEvent(self._line(_Piece(thinking=PLACE)))

    def part(self, choice: int, part: AnswerPart) -> bytes:
        match part.kind:
            case "reasoning":
                return self._thinking.with_text(part.text)
            case "text" if not part.logprobs:
                return self._text.with_text(part.text)
            case "text":
                return self._line(_Piece(part.text, logprobs=part.logprobs))
            case "call_end":
                self._n_calls += 1
                return self._line_of_calls(self.answers[0].all_calls[self._n_calls - 1 : self._n_calls])
        return b""

    def finished(self, choice: int) -> bytes:
        return self._line_of_calls(self.answers[0].all_calls[self._n_calls :])

    def end(self) -> bytes:
        return json_line(self._body(_Piece()) | self._summary())

    def error(self, error: LlmrunError) -> bytes:
        return json_line(error_body(error, error.http_status))

    def whole(self) -> dict[str, Any]:
        (answer,) = self.answers
        piece = _Piece(answer.text, answer.reasoning, answer.all_calls, answer.text_logprobs)
        return self._body(piece) | self._summary()

    def _line_of_calls(self, calls: Sequence[ToolCall]) -> bytes:
        return self._line(_Piece(calls=calls)) if complete_calls(calls) else b""

    def _line(self, piece: _Piece) -> bytes:
        return json_line(self._body(piece) | {"done": False})

    def _body(self, piece: _Piece) -> dict[str, Any]:
        logprobs = {"logprobs": [_logprob(token) for token in piece.logprobs]} if piece.logprobs else {}
        return self._head | self._shape(piece) | logprobs

    def _summary(self) -> dict[str, Any]:
        answer, stats = self.answers[0], self.answers[0].stats
        reason = self._reason
        if answer.reason:
            reason = "length" if answer.reason == "length" else "stop"
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": _nanoseconds(stats.ttft_seconds + stats.decode_seconds),
            "load_duration": 0,
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(stats.prefill_seconds),
            "eval_count": stats.completion_tokens,
            "eval_duration": _nanoseconds(stats.decode_seconds),
        }


def _chat_shape(piece: _Piece) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": piece.text}
    if piece.thinking:
        message["thinking"] = piece.thinking
    if calls := complete_calls(piece.calls):
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": arguments}} for call, arguments in calls
        ]
    return {"message": message}


def _generate_shape(piece: _Piece) -> dict[str, Any]:
    return {"response": piece.text} | ({"thinking": piece.thinking} if piece.thinking else {})


chat_writer = partial(LineWriter, _chat_shape)
generate_writer = partial(LineWriter, _generate_shape)


def error_body(error: LlmrunError, status: int) -> dict[str, Any]:
    """Return Ollama's "error", and our own code."""
    return {"error": f"{error}; {error.hint}" if error.hint else str(error), "code": error.code}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    top = [{"token": text, "logprob": logprob, "bytes": list(data)} for text, data, logprob in token.top]
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes), "top_logprobs": top}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)

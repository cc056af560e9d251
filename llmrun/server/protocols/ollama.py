"""Ollama's protocol: /api/chat and /api/generate. Pure; see llmrun.server.answer_parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from llmrun.errors import LlmrunError, UsageError
from llmrun.grammar import Grammar
from llmrun.protocol.logprobs import MOST_TOP_LOGPROBS
from llmrun.protocol.messages import AnswerRequest, Image, Message, Stats, TokenLogprob, Tool, ToolCall
from llmrun.protocol.params import MOST_TOKENS, Limits
from llmrun.server.answer_parts import (
    AccumulatedAnswer,
    AnswerText,
    CallArguments,
    CompletionRequest,
    Envelope,
    Part,
    ReasoningText,
    Writer,
)
from llmrun.server.durations import read_duration
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.images import image_from_base64
from llmrun.server.protocols.ollama_models import unix_time
from llmrun.server.protocols.sampling import ANY_OBJECT, read_drafts, read_sampling, schema_grammar
from llmrun.server.protocols.tools import call_arguments, checked_tools, tool, tool_call
from llmrun.server.sse import NDJSON, line

_MOST_CONTEXT = 2**27
_MOST_SECONDS = 10 * 365 * 86_400
_FOR_EVER = -1.0


# ---- what is asked


def read_chat(body: Mapping[str, Any]) -> CompletionRequest:
    """A request to /api/chat. Without messages it only loads the model, or with a keep_alive of 0 lets go of it.

    Raises:
        UsageError, BadGrammarError: a field is invalid.
    """
    fields = Fields(body)
    messages = tuple(_message(item) for item in fields.objects("messages"))
    return _asked(fields, AnswerRequest(messages, tools=checked_tools(map(_tool, fields.objects("tools")), "auto")))


def read_generate(body: Mapping[str, Any]) -> CompletionRequest:
    """A request to /api/generate. Without a prompt it only loads the model, or with a keep_alive of 0 lets go of it.

    Raises:
        UsageError, BadGrammarError: a field is invalid.
    """
    fields = Fields(body)
    prompt, system = fields.text("prompt") or "", fields.text("system") or ""
    if fields.text("suffix"):
        raise UsageError("suffix can't be used", why="no model is asked to fill a gap yet", hint="leave it out")
    if fields.text("template"):
        raise UsageError("template can't be used", why="Go templates are not read", hint="use raw: true")
    pictures = _pictures(fields)
    if not prompt and not pictures:
        return _asked(fields, AnswerRequest())
    if fields.flag("raw"):
        if pictures:
            raise UsageError("raw and images exclude each other", why="a picture needs a chat template around it")
        return _asked(fields, AnswerRequest(prompt=prompt))
    first = (Message("system", system),) if system else ()
    return _asked(fields, AnswerRequest((*first, Message("user", prompt, pictures=pictures))))


def _asked(fields: Fields, request: AnswerRequest) -> CompletionRequest:
    options = fields.object("options") or Fields({}, "options")
    options.whole("num_ctx", 1, _MOST_CONTEXT)  # many clients always send one; the window is the server's --ctx
    most = options.whole("num_predict", -2, MOST_TOKENS) or 0  # -1 and -2 are as many as there is room for
    return CompletionRequest(
        model=fields.text("model") or fields.text("name") or "",
        request=replace(
            request,
            limits=Limits(most if most > 0 else None, options.texts("stop")),
            grammar=_format(fields),
            thinking=_thinking(fields),
            logprobs=_logprobs(fields),
        ),
        sampling=read_sampling(options),
        stream=fields.flag("stream") is not False,
        keep_seconds=read_keep_seconds(fields),
        speculate=read_drafts(options),
    )


def _message(fields: Fields) -> Message:
    calls = tuple(
        tool_call(made.text("id") or "", made.object("function") or made) for made in fields.objects("tool_calls")
    )
    name = fields.text("tool_name") or fields.text("name") or ""
    role, call_id = fields.needed_text("role"), fields.text("tool_call_id") or ""
    return Message(role, fields.text("content") or "", calls, call_id, name, _pictures(fields))


def _pictures(fields: Fields) -> tuple[Image, ...]:
    """They stand before the text."""
    given = fields.texts("images")
    return tuple(image_from_base64(data, f"{fields.name('images')}[{index}]", 0) for index, data in enumerate(given))


def _tool(fields: Fields) -> Tool:
    return tool(fields.object("function") or fields, "parameters")


def _format(fields: Fields) -> Grammar | None:
    wanted = fields.data.get("format")
    if wanted in (None, ""):
        return None
    if wanted == "json":
        return ANY_OBJECT
    if not isinstance(wanted, Mapping):
        raise UsageError("invalid format", why='must be "json" or a JSON schema')
    return schema_grammar(wanted)


def _thinking(fields: Fields) -> bool | None:
    """Newer models take how hard to think instead."""
    if isinstance(fields.data.get("think"), str):
        return fields.choice("think", "low", "medium", "high") is not None
    return fields.flag("think")


def _logprobs(fields: Fields) -> int | None:
    top = fields.whole("top_logprobs", 0, MOST_TOP_LOGPROBS) or 0
    return top if fields.flag("logprobs") else None


def read_keep_seconds(fields: Fields) -> float | None:
    """keep_alive: seconds, or a duration as Go writes it; any below 0 is for ever."""
    value = fields.data.get("keep_alive")
    seconds = _duration(value) if isinstance(value, str) else fields.number("keep_alive", -_MOST_SECONDS, _MOST_SECONDS)
    if seconds is None:
        return None
    if not abs(seconds) <= _MOST_SECONDS:
        raise UsageError("invalid keep_alive", why="must be at most ten years")
    return seconds if seconds >= 0 else _FOR_EVER


def _duration(text: str) -> float:
    seconds = read_duration(text)
    if seconds is None:
        raise UsageError(f"invalid keep_alive {text[:80]!r}", why='must be seconds, or a duration like "5m" or "1h30m"')
    return seconds


# ---- what is answered


class _Piece(NamedTuple):
    """What one line says, or a whole answer."""

    text: str = ""
    thinking: str = ""
    calls: Sequence[ToolCall] = ()
    logprobs: Sequence[TokenLogprob] = ()


class _Writer:
    """An answer as lines of JSON.

    A call of a tool is one piece, because its arguments are an object: it is held back until they are complete, and
    left out where the answer ends before.

    Args:
        body: that was asked with.
        shape: where chat and generate have text, thoughts and calls.
    """

    media_type = NDJSON

    def __init__(self, body: Mapping[str, Any], envelope: Envelope, shape: Callable[[_Piece], dict[str, Any]]) -> None:
        self._unanswered = "unload" if read_keep_seconds(Fields(body)) == 0 else "load"
        self._envelope = envelope
        self._shape = shape
        self._answer = AccumulatedAnswer()
        self._told_calls = 0

    def begin(self) -> bytes:
        """See Writer: Ollama begins with the first piece."""
        return b""

    def feed(self, part: Part) -> bytes:
        """See Writer."""
        written = b"" if isinstance(part, CallArguments) else self._complete_calls()
        self._answer.add(part)
        match part:
            case ReasoningText():
                written += self._line(_Piece(thinking=part.text))
            case AnswerText():
                written += self._line(_Piece(part.text, logprobs=part.logprobs))
        return written

    def end(self) -> bytes:
        """See Writer."""
        return line(self._body(_Piece()) | self._summary())

    def error(self, error: LlmrunError) -> bytes:
        """See Writer."""
        return line(error_body(error, error.http_status))

    def whole(self) -> dict[str, Any]:
        """See Writer."""
        answer = self._answer
        return self._body(_Piece(answer.text, answer.reasoning, answer.calls, answer.logprobs)) | self._summary()

    def _complete_calls(self) -> bytes:
        """The call whose arguments have all come now."""
        calls = self._answer.calls[self._told_calls :]
        self._told_calls += len(calls)
        return self._line(_Piece(calls=calls)) if any(call_arguments(call) is not None for call in calls) else b""

    def _line(self, piece: _Piece) -> bytes:
        return line(self._body(piece) | {"done": False})

    def _body(self, piece: _Piece) -> dict[str, Any]:
        head = {"model": self._envelope.model, "created_at": unix_time(self._envelope.created)}
        logprobs = {"logprobs": [_logprob(token) for token in piece.logprobs]} if piece.logprobs else {}
        return head | self._shape(piece) | logprobs

    def _reason(self) -> str:
        """Why it ended; without an answer the model was only loaded, or let go."""
        ended = self._answer.finished
        if ended is None:
            return self._unanswered
        return "length" if ended.reason == "length" else "stop"

    def _summary(self) -> dict[str, Any]:
        ended = self._answer.finished
        stats = ended.stats if ended else Stats()
        return {
            "done": True,
            "done_reason": self._reason(),
            "total_duration": _nanoseconds(stats.ttft_seconds + stats.decode_seconds),
            "load_duration": 0,
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(stats.prefill_seconds),
            "eval_count": stats.completion_tokens,
            "eval_duration": _nanoseconds(stats.decode_seconds),
        }


def chat_writer(body: Mapping[str, Any], envelope: Envelope) -> Writer:
    """For an answer to /api/chat."""
    return _Writer(body, envelope, _chat_shape)


def generate_writer(body: Mapping[str, Any], envelope: Envelope) -> Writer:
    """For an answer to /api/generate."""
    return _Writer(body, envelope, _generate_shape)


def _chat_shape(piece: _Piece) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": piece.text}
    if piece.thinking:
        message["thinking"] = piece.thinking
    complete = [(made, arguments) for made in piece.calls if (arguments := call_arguments(made)) is not None]
    if complete:
        message["tool_calls"] = [
            {"id": made.id, "function": {"name": made.name, "arguments": arguments}} for made, arguments in complete
        ]
    return {"message": message}


def _generate_shape(piece: _Piece) -> dict[str, Any]:
    return {"response": piece.text} | ({"thinking": piece.thinking} if piece.thinking else {})


def error_body(error: LlmrunError, status: int) -> dict[str, Any]:
    """What Ollama's clients read is "error"; the code is ours."""
    return {"error": str(error), "code": error.code}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    top = [{"token": text, "logprob": logprob, "bytes": list(data)} for text, data, logprob in token.top]
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes), "top_logprobs": top}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)

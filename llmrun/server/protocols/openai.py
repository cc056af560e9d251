"""Common parts of OpenAI's protocols: errors, message content, usage, finish reasons, logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmrun.errors import ContextOverflowError, LlmrunError
from llmrun.protocol.answer import ResponseAccumulator, logprob_entries
from llmrun.protocol.media import Media
from llmrun.protocol.messages import AnswerRequest, TokenLogprob
from llmrun.server.answer import SSE_DONE, CompletionRequest, Envelope, sse_event
from llmrun.server.protocols.attachments import input_audio, media_from_url, openai_file, refuse_media
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.options import MOST_ANSWERS, completion_request, read_adapters
from llmrun.server.protocols.timings import FINGERPRINT, ProgressWriter, timings

_CODES = {"context-overflow": "context_length_exceeded", "model-not-found": "model_not_found"}
"""Our error codes that clients know by another name."""
_OVERFLOW = (
    "This model's maximum context length is {limit} tokens. However, your messages resulted in {length} tokens. "
    "Please reduce the length of the messages."
)
"""OpenAI's sentence: clients look for it, and shorten the conversation."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}

_TEXTS = frozenset({"text", "input_text", "output_text", "refusal"})
_FILES = frozenset({"file", "input_file"})
_IMAGES = frozenset({"image_url", "input_image"})

_FINISH_REASONS = {"length": "length", "tool_calls": "tool_calls"}
"""All others are "stop"."""


def error_body(error: LlmrunError, status: int) -> dict[str, Any]:
    message, counts = str(error), dict[str, int]()
    if isinstance(error, ContextOverflowError) and error.size is not None:
        length, limit = error.size
        message = _OVERFLOW.format(length=length, limit=limit)
        counts = {"n_prompt_tokens": length, "n_ctx": limit}  # as llama-server names them
    message = f"{message}; {error.hint}" if error.hint else message
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if isinstance(error, ContextOverflowError):
        kind = "exceed_context_size_error"  # llama-server's; OpenAI's clients look at the code
    code = _CODES.get(error.code, error.code)
    return {"error": {"message": message, "type": kind, "param": None, "code": code, **counts}}


def content(fields: Fields, key: str) -> tuple[str, tuple[Media, ...]]:
    """Return the text of a message's content, its images and audio: a string, or a list of parts.

    Raises:
        UsageError: it contains something else.
    """
    value = fields.value(key)
    if value is None or isinstance(value, str):
        return value or "", ()
    text, media = "", list[Media]()
    for part in fields.objects(key):
        kind = part.needed_text("type")
        if kind in _IMAGES:
            media.append(media_from_url(part, "image_url", len(text), "image"))
        elif kind == "input_audio":
            media.append(input_audio(part, len(text)))
        elif kind == "audio_url":  # as vLLM has it
            media.append(media_from_url(part, "audio_url", len(text), "audio"))
        elif kind in _FILES:
            text += openai_file(part)
        elif kind in _TEXTS:
            text += part.needed_text("refusal" if kind == "refusal" else "text")
        else:
            refuse_media(f"{part.name('type')} {kind[:80]!r}")
    return text, tuple(media)


def usage(prompt_tokens: int, cached_tokens: int, answers: Sequence[ResponseAccumulator]) -> dict[str, Any]:
    """Return the cost of a request, with drafts and reasoning. The prompt counts once for any number of answers."""
    finished = [answer for answer in answers if answer.finished is not None]
    completion = sum(answer.stats.completion_tokens for answer in finished)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    details: dict[str, int] = {}
    if drafted := sum(answer.stats.drafted_tokens for answer in finished):
        accepted = sum(answer.stats.accepted_tokens for answer in finished)
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    if reasoning := sum(answer.reasoning_tokens for answer in finished):
        details["reasoning_tokens"] = reasoning
    if details:
        counts["completion_tokens_details"] = details
    return counts


def logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    return {"content": logprob_entries(tokens), "refusal": None}


def completion_of_several(fields: Fields, request: AnswerRequest) -> CompletionRequest:
    """Return the completion that a body requests, with the fields that only chat and text completions have."""
    _includes_usage(fields)
    if fields.flag("stream"):
        fields.flag("return_progress")
    return completion_request(fields, replace(request, adapters=read_adapters(fields)), n_answers(fields))


def n_answers(fields: Fields) -> int:
    """Return the number of answers to each prompt."""
    named = [fields.whole(name, 1, MOST_ANSWERS) for name in ("n", "n_cmpl")]  # the second is llama-server's
    return next(filter(None, named), 1)


def _includes_usage(fields: Fields) -> bool:
    options = fields.object("stream_options")
    return options is not None and bool(options.flag("include_usage"))


class CompletionWriter(ProgressWriter):
    """The base of the writers of both kinds of completions."""

    def __init__(self, body: Mapping[str, Any], envelope: Envelope) -> None:
        fields = Fields(body)
        self._has_usage = _includes_usage(fields)
        self._envelope = envelope
        self._n = n_answers(fields)
        super().__init__(fields, self._n * self._count_prompts(fields))

    def _count_prompts(self, fields: Fields) -> int:
        return 1

    def error(self, error: LlmrunError) -> bytes:
        return sse_event(error_body(error, error.http_status))

    def _end(self, kind: str) -> bytes:
        """Return the usage, if it was requested, and the last line of a stream."""
        if not self._has_usage:
            return SSE_DONE
        return sse_event({**self._head(kind), "choices": [], "usage": self._usage(), **self._timings(0)}) + SSE_DONE

    def _head(self, kind: str) -> dict[str, Any]:
        envelope = self._envelope
        return {
            "id": envelope.id,
            "object": kind,
            "created": envelope.created,
            "model": envelope.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _timings(self, index: int) -> dict[str, Any]:
        """Return llama-server's field with the times of an answer. In a stream it is in the last chunk."""
        return {"timings": timings(self.answers[index].stats)}

    def _usage(self) -> dict[str, Any]:
        prompt_tokens = cached_tokens = 0
        for first in range(0, len(self.answers), self._n):  # of each prompt
            started = [answer.started for answer in self.answers[first : first + self._n] if answer.started is not None]
            prompt_tokens += max((each.prompt_tokens for each in started), default=0)
            cached_tokens += min((each.reused_tokens for each in started), default=0)  # the others share the first one
        return usage(prompt_tokens, cached_tokens, self.answers)


def finish_reason(answer: ResponseAccumulator) -> str | None:
    """Return OpenAI's word for the end of an answer; None before its end."""
    return _FINISH_REASONS.get(answer.reason, "stop") if answer.reason else None

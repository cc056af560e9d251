"""OpenAI's completions of plain text, without a chat template. Pure; see llmrun.server.asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.messages import AnswerRequest, Stats, TokenLogprob
from llmrun.server import sse
from llmrun.server.asked import Asked, Begun, Ended, Envelope, Part, Text, Thought
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai import FINISH_REASONS, error_body, usage
from llmrun.server.protocols.sampling import (
    MOST_ANSWERS,
    MOST_TOP_LOGPROBS,
    read_grammar_fields,
    read_limits,
    read_sampling,
)

__all__ = ["error_body", "read", "writer"]


def read(body: Mapping[str, Any]) -> Asked:
    """What a client asks for.

    Raises:
        UsageError: a field has an invalid value; names it.
        BadGrammarError: the JSON schema or the grammar is broken.
    """
    fields = Fields(body)
    if fields.text("suffix"):
        raise UsageError("suffix is not supported", hint="leave it out")
    request = AnswerRequest(
        prompt=_prompt(fields),
        limits=read_limits(fields, "max_tokens", "n_predict"),
        grammar=read_grammar_fields(fields),
        stops_repeats=bool(fields.flag("stops_repeats")),
        logprobs=fields.whole("logprobs", 0, MOST_TOP_LOGPROBS),
        salt=fields.text("cache_salt") or "",
    )
    return Asked(
        fields.text("model") or "",
        request,
        read_sampling(fields),
        n=fields.whole("n", 1, MOST_ANSWERS) or 1,
        stream=bool(fields.flag("stream")),
    )


def _prompt(fields: Fields) -> str:
    """The one prompt there is.

    Raises:
        UsageError: there are several, or one of token ids.
    """
    prompts = fields.texts("prompt")
    if len(prompts) != 1:
        raise UsageError(f"prompt must be one string, not {len(prompts)}", hint="send a request for each")
    return prompts[0]


def writer(body: Mapping[str, Any], envelope: Envelope) -> TextWriter:
    """What writes the answer to a body that read() took."""
    fields = Fields(body)
    options = fields.object("stream_options")
    asked_for_usage = options is not None and bool(options.flag("include_usage"))
    echoed = _prompt(fields) if fields.flag("echo") else ""
    return TextWriter(envelope, fields.whole("n", 1, MOST_ANSWERS) or 1, has_usage=asked_for_usage, echoed=echoed)


class TextWriter:
    """Writes text completions, in one or in pieces.

    Args:
        envelope: around them.
        n: how many.
        has_usage: the last piece of a stream says what it cost.
        echoed: what stands before every answer.
    """

    media_type = sse.EVENT_STREAM

    def __init__(self, envelope: Envelope, n: int, *, has_usage: bool, echoed: str) -> None:
        self._envelope, self._has_usage, self._echoed = envelope, has_usage, echoed
        self._texts = [[echoed] if echoed else [] for _ in range(n)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(n)]
        self._reasons: list[str | None] = [None] * n
        self._stats = [Stats()] * n
        self._prompt_tokens = self._cached_tokens = 0

    def begin(self) -> bytes:
        """The prompt, where it is to be repeated; else nothing that a client could want, so a comment."""
        if not self._echoed:
            return sse.COMMENT
        return b"".join(self._chunk(index, self._echoed) for index in range(len(self._texts)))

    def feed(self, part: Part) -> bytes:
        """See asked.Writer."""
        if isinstance(part, Begun):
            self._prompt_tokens = part.prompt_tokens
            if part.choice == 0:
                self._cached_tokens = part.cached_tokens
        elif isinstance(part, (Text, Thought)):  # thoughts are text like any other where there is no template
            self._texts[part.choice].append(part.text)
            tokens = part.logprobs if isinstance(part, Text) else ()
            self._logprobs[part.choice] += tokens
            return self._chunk(part.choice, part.text, tokens)
        elif isinstance(part, Ended):
            self._stats[part.choice] = part.stats
            self._reasons[part.choice] = FINISH_REASONS.get(part.reason, "stop")
            return self._chunk(part.choice, "")
        return b""

    def end(self) -> bytes:
        """Usage, where it was asked for, and the last line."""
        return (
            sse.event({**self._head(), "choices": [], "usage": self._usage()}) + sse.DONE
            if self._has_usage
            else sse.DONE
        )

    def error(self, error: LlmrunError) -> bytes:
        """See asked.Writer."""
        return sse.event(error_body(error, error.http_status))

    def whole(self) -> dict[str, Any]:
        """See asked.Writer."""
        choices = [
            self._choice(index, "".join(texts), self._logprobs[index]) for index, texts in enumerate(self._texts)
        ]
        return {**self._head(), "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        return usage(self._prompt_tokens, self._cached_tokens, self._stats)

    def _head(self) -> dict[str, Any]:
        answer_id, created, model = self._envelope
        return {"id": answer_id, "object": "text_completion", "created": created, "model": model}

    def _chunk(self, index: int, text: str, tokens: tuple[TokenLogprob, ...] = ()) -> bytes:
        return sse.event({**self._head(), "choices": [self._choice(index, text, tokens)]})

    def _choice(self, index: int, text: str, tokens: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> dict[str, Any]:
        found = _old_logprobs(tokens) if tokens else None
        return {"index": index, "text": text, "logprobs": found, "finish_reason": self._reasons[index]}


def _old_logprobs(tokens: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> dict[str, Any]:
    """As completions have them, which is not as chat completions do."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{text: logprob for text, _, logprob in token.top} for token in tokens],
    }

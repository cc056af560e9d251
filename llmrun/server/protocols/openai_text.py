"""OpenAI's completions of plain text, without a chat template. Pure; see llmrun.server.answer_parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmrun.errors import UsageError
from llmrun.protocol.logprobs import MOST_TOP_LOGPROBS
from llmrun.protocol.messages import AnswerRequest, TokenLogprob
from llmrun.server import sse
from llmrun.server.answer_parts import AnswerText, CompletionRequest, Envelope, Part, ReasoningText, ResponseFinished
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai import CompletionWriter, asked, error_body, reason_of
from llmrun.server.protocols.sampling import (
    read_grammar_fields,
    read_limits,
)

__all__ = ["error_body", "read", "writer"]

_KIND = "text_completion"


def read(body: Mapping[str, Any]) -> CompletionRequest:
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
    return asked(fields, request)


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
    return TextWriter(body, envelope)


class TextWriter(CompletionWriter):
    """Writes text completions, in one or in pieces."""

    def __init__(self, body: Mapping[str, Any], envelope: Envelope) -> None:
        super().__init__(body, envelope)
        fields = Fields(body)
        self._echoed = _prompt(fields) if fields.flag("echo") else ""  # what stands before every answer

    def begin(self) -> bytes:
        """The prompt, where it is to be repeated; else nothing that a client could want, so a comment."""
        if not self._echoed:
            return sse.COMMENT
        return b"".join(self._chunk(index, self._echoed) for index in range(len(self._answers)))

    def feed(self, part: Part) -> bytes:
        """See asked.Writer."""
        if isinstance(part, ReasoningText):  # text like any other where there is no template
            part = AnswerText(part.choice, part.text)
        self._answers[part.choice].add(part)
        if isinstance(part, AnswerText):
            return self._chunk(part.choice, part.text, part.logprobs)
        return self._chunk(part.choice, "") if isinstance(part, ResponseFinished) else b""

    def end(self) -> bytes:
        """See asked.Writer."""
        return self._end(_KIND)

    def whole(self) -> dict[str, Any]:
        """See asked.Writer."""
        choices = [
            self._choice(index, self._echoed + answer.text, answer.logprobs)
            for index, answer in enumerate(self._answers)
        ]
        return {**self._head(_KIND), "choices": choices, "usage": self._usage()}

    def _chunk(self, index: int, text: str, tokens: Sequence[TokenLogprob] = ()) -> bytes:
        return sse.event({**self._head(_KIND), "choices": [self._choice(index, text, tokens)]})

    def _choice(self, index: int, text: str, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        found = _old_logprobs(tokens) if tokens else None
        reason = reason_of(self._answers[index])
        return {"index": index, "text": text, "logprobs": found, "finish_reason": reason}


def _old_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """As completions have them, which is not as chat completions do."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{text: logprob for text, _, logprob in token.top} for token in tokens],
    }

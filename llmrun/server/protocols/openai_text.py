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
from llmrun.server.protocols.openai import CompletionWriter, completion_request, error_body, finish_reason
from llmrun.server.protocols.sampling import read_grammar_fields, read_limits

__all__ = ["error_body", "read", "writer"]

_KIND = "text_completion"


def read(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the request of a body.

    Raises:
        UsageError: a field has an invalid value; names it.
        BadGrammarError: the JSON schema or the grammar is invalid.
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
    return completion_request(fields, request)


def _prompt(fields: Fields) -> str:
    """Return the prompt.

    Raises:
        UsageError: there are several, or it is a list of token ids.
    """
    prompts = fields.texts("prompt")
    if len(prompts) != 1:
        raise UsageError(f"prompt must be one string, not {len(prompts)}", hint="send a request for each")
    return prompts[0]


class TextWriter(CompletionWriter):
    """Writes text completions and their chunks."""

    def __init__(self, body: Mapping[str, Any], envelope: Envelope) -> None:
        super().__init__(body, envelope)
        fields = Fields(body)
        self._echo = _prompt(fields) if fields.flag("echo") else ""  # before every answer
        self._texts = [sse.TextEvent(self._chunk(index, sse.PLACE)) for index in range(len(self._answers))]

    def begin(self) -> bytes:
        """Return the prompt, if the client wants it repeated; otherwise a comment, since there is nothing to say."""
        if not self._echo:
            return sse.COMMENT
        return b"".join(self._chunk(index, self._echo) for index in range(len(self._answers)))

    def feed(self, part: Part) -> bytes:
        if isinstance(part, ReasoningText):  # plain text without a template
            part = AnswerText(part.choice, part.text)
        self._answers[part.choice].add(part)
        if isinstance(part, AnswerText) and not part.logprobs:
            return self._texts[part.choice].with_text(part.text)
        if isinstance(part, AnswerText):
            return self._chunk(part.choice, part.text, part.logprobs)
        return self._chunk(part.choice, "") if isinstance(part, ResponseFinished) else b""

    def end(self) -> bytes:
        return self._end(_KIND)

    def whole(self) -> dict[str, Any]:
        choices = [
            self._choice(index, self._echo + answer.text, answer.logprobs) for index, answer in enumerate(self._answers)
        ]
        return {**self._head(_KIND), "choices": choices, "usage": self._usage()}

    def _chunk(self, index: int, text: str, tokens: Sequence[TokenLogprob] = ()) -> bytes:
        return sse.event({**self._head(_KIND), "choices": [self._choice(index, text, tokens)]})

    def _choice(self, index: int, text: str, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        logprobs, reason = _logprobs(tokens) if tokens else None, finish_reason(self._answers[index])
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


writer = TextWriter


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{text: logprob for text, _, logprob in token.top} for token in tokens],
    }

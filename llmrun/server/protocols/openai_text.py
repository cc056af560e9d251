"""OpenAI's completions of plain text, without a chat template. Pure; see llmrun.server.answer_parts."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
_MOST_PROMPTS = 64
HIGHEST_TOKEN = 2**31 - 1


def read(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the request of a body.

    Raises:
        UsageError: a field has an invalid value; names it.
        BadGrammarError: the JSON schema or the grammar is invalid.
    """
    fields = Fields(body)
    first, *others = (
        AnswerRequest(
            prompt=prompt if isinstance(prompt, str) else "",
            prompt_tokens=() if isinstance(prompt, str) else prompt,
            suffix=fields.text("suffix") or None,
            limits=read_limits(fields, "max_tokens", "n_predict"),
            grammar=read_grammar_fields(fields),
            stops_repeats=bool(fields.flag("stops_repeats")),
            logprobs=fields.whole("logprobs", 0, MOST_TOP_LOGPROBS),
            salt=fields.text("cache_salt") or "",
        )
        for prompt in read_prompts(fields)
    )
    _check(fields, (first, *others))
    if fields.whole("best_of", 0, 2**31) not in (None, 1):
        fields.ignore("best_of")
    completion = completion_request(fields, first)
    return completion._replace(others=tuple(replace(each, adapters=completion.request.adapters) for each in others))


def read_prompts(fields: Fields) -> list[str | tuple[int, ...]]:
    """Return the prompts: a text or a list of token ids each.

    Raises:
        UsageError: there is none, or too many, or one is something else.
    """
    value = fields.value("prompt")
    several = value if isinstance(value, list) and value and type(value[0]) is not int else [value]
    prompts: list[str | tuple[int, ...]] = [
        each if isinstance(each, str) else Fields({"prompt": each}).wholes("prompt", 0, HIGHEST_TOKEN)
        for each in several
    ]
    if not all(each or isinstance(each, str) for each in prompts):
        raise UsageError("prompt is missing, or one is empty")
    if len(prompts) > _MOST_PROMPTS:
        raise UsageError(f"prompt has {len(prompts):,} entries", why=f"the maximum is {_MOST_PROMPTS}")
    return prompts


def _check(fields: Fields, requests: Sequence[AnswerRequest]) -> None:
    """Raise UsageError for fields that would mislead if they were ignored."""
    has_tokens = any(each.prompt_tokens for each in requests)
    if fields.flag("echo") and (has_tokens or requests[0].logprobs is not None):
        why = "the text of token ids is not known here" if has_tokens else "those of a prompt are not computed"
        name = "token ids" if has_tokens else "log-probabilities"
        raise UsageError(f"echo can't be used with {name}", why=why, hint="leave echo out")
    if requests[0].suffix is not None and has_tokens:
        raise UsageError("suffix can't be used with token ids", hint="give the prompt as text")


class TextOffsets:
    """The places of an answer's tokens in its text, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may be a part of a character
        self._n_characters = 0

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens, in the form of OpenAI's older protocol."""
        offsets = []
        for token in tokens:
            offsets.append(self._n_characters)
            self._n_characters += len(self._decoder.decode(bytes(token.bytes)))
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{text: logprob for text, _, logprob in token.top} for token in tokens],
            "text_offset": offsets,
        }


class TextWriter(CompletionWriter):
    """Writes text completions and their chunks."""

    def __init__(self, body: Mapping[str, Any], envelope: Envelope) -> None:
        super().__init__(body, envelope)
        fields = Fields(body)
        prompts = read_prompts(fields) if fields.flag("echo") else []
        self._echoes = [str(prompt) for prompt in prompts for _ in range(self._n)] or [""] * len(self._answers)
        self._offsets = [TextOffsets() for _ in self._answers]
        self._texts = [sse.TextEvent(self._chunk(index, sse.PLACE)) for index in range(len(self._answers))]

    def _count_prompts(self, fields: Fields) -> int:
        return len(read_prompts(fields))

    def begin(self) -> bytes:
        """Return the prompts, if the client wants them repeated; otherwise a comment, since there is nothing to say."""
        if not any(self._echoes):
            return sse.COMMENT
        return b"".join(self._chunk(index, echo) for index, echo in enumerate(self._echoes))

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
            self._choice(index, self._echoes[index] + answer.text, answer.logprobs, TextOffsets())
            for index, answer in enumerate(self._answers)
        ]
        return {**self._head(_KIND), "choices": choices, "usage": self._usage()}

    def _chunk(self, index: int, text: str, tokens: Sequence[TokenLogprob] = ()) -> bytes:
        data = {**self._head(_KIND), "choices": [self._choice(index, text, tokens, self._offsets[index])]}
        return sse.event({**data, "usage": None} if self._has_usage else data)

    def _choice(self, index: int, text: str, tokens: Sequence[TokenLogprob], offsets: TextOffsets) -> dict[str, Any]:
        logprobs, reason = offsets.logprobs(tokens) if tokens else None, finish_reason(self._answers[index])
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


writer = TextWriter

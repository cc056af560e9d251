"""OpenAI's completions of plain text, without a chat template. Pure; see llmrun.server.answer."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from llmrun.errors import UsageError
from llmrun.protocol.arguments import MOST_TOP_LOGPROBS
from llmrun.protocol.messages import AnswerPart, AnswerRequest, TokenLogprob, fields_with
from llmrun.server.answer import PLACE, SSE_COMMENT, CompletionRequest, Envelope, TextEvent, sse_event
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai import CompletionWriter, completion_of_several, error_body, finish_reason
from llmrun.server.protocols.options import HIGHEST_TOKEN, read_grammar_fields, read_limits, read_request_fields

__all__ = ["error_body", "read", "writer"]

_KIND = "text_completion"
_MOST_PROMPTS = 64


def read(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the request of a body.

    Raises:
        UsageError: a field has an invalid value; names it.
        BadGrammarError: the JSON schema or the grammar is invalid.
    """
    fields = Fields(body)
    first, *others = (
        request_for(
            prompt,
            suffix=fields.text("suffix") or None,
            limits=read_limits(fields, "max_tokens", "n_predict"),
            grammar=read_grammar_fields(fields),
            logprobs=fields.whole("logprobs", 0, MOST_TOP_LOGPROBS),
            **read_request_fields(fields, fields_with(needs_template=False)),
        )
        for prompt in read_prompts(fields)
    )
    _check(fields, (first, *others))
    if fields.whole("best_of", 0, 2**31) not in (None, 1):
        fields.ignore("best_of")
    completion = completion_of_several(fields, first)
    return completion._replace(
        others=tuple(replace(each, adapters=completion.request.adapters) for each in others),
        scores_prompts=fields.flag("echo") is True and (first.logprobs is not None or bool(first.prompt_tokens)),
    )


Prompt = str | tuple[int | str, ...]
"""A text, or token ids with texts between them."""


def read_prompts(fields: Fields) -> list[Prompt]:
    """Return the prompts. As in llama-server, a list with a token id in it is one prompt.

    Raises:
        UsageError: there is none, or too many, or one is something else.
    """
    value = fields.value("prompt")
    several = value if isinstance(value, list) and value and not any(type(each) is int for each in value) else [value]
    if len(several) > _MOST_PROMPTS:
        raise UsageError(f"prompt has {len(several):,} entries", why=f"the maximum is {_MOST_PROMPTS}")
    return list(map(_prompt, several))


def _prompt(value: Any) -> Prompt:
    if isinstance(value, dict):  # llama-server's
        inner = Fields(value, "prompt")
        if inner.value("multimodal_data"):
            hint = "/v1/chat/completions takes images and audio"
            raise UsageError("prompt.multimodal_data can't be used here", hint=hint)
        value = inner.needed_text("prompt_string")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise UsageError("prompt is missing, or one is empty")
    if not all(isinstance(each, str) or (type(each) is int and 0 <= each <= HIGHEST_TOKEN) for each in value):
        raise UsageError(
            "prompt must be a text, or a list of token ids",
            why=f"a token id is a whole number from 0 to {HIGHEST_TOKEN:,}",
            hint="a list may have texts between token ids, or be one of several prompts",
        )
    return tuple(value)


def request_for(prompt: Prompt, **fields: Any) -> AnswerRequest:
    """Return the request for an answer to a prompt; `fields` are all others of an AnswerRequest."""
    if isinstance(prompt, str):
        return AnswerRequest(prompt=prompt, **fields)
    return AnswerRequest(prompt="", prompt_tokens=prompt, **fields)


def _check(fields: Fields, requests: Sequence[AnswerRequest]) -> None:
    """Raise UsageError for fields that would mislead if they were ignored."""
    has_tokens = any(each.prompt_tokens for each in requests)
    if fields.flag("echo") and requests[0].suffix is not None and requests[0].logprobs is not None:
        raise UsageError("echo with log-probabilities can't be used with a suffix", hint="leave one of them out")
    if requests[0].suffix is not None and has_tokens:
        raise UsageError("suffix can't be used with token ids", hint="give the prompt as text")


class TextOffsets:
    """The places of tokens in a text, in characters.

    Args:
        n_before: characters of the first tokens that are not in the text: of the begin-of-sequence token.
    """

    def __init__(self, n_before: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may be a part of a character
        self._n_characters = -n_before

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens, in the form of OpenAI's older protocol."""
        offsets = []
        for token in tokens:
            offsets.append(max(self._n_characters, 0))
            self._n_characters += len(self._decoder.decode(bytes(token.bytes)))
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{text: logprob for text, _, logprob in token.top} for token in tokens],
            "text_offset": offsets,
        }

    def prompt_logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the log-probabilities of a prompt's tokens, the first of which nothing predicts."""
        found = self.logprobs(tokens)
        found["token_logprobs"][:1] = found["top_logprobs"][:1] = [None]
        return found


class TextWriter(CompletionWriter):
    """Writes text completions and their chunks."""

    def __init__(self, body: Mapping[str, Any], envelope: Envelope) -> None:
        super().__init__(body, envelope)
        fields = Fields(body)
        prompts = read_prompts(fields) if fields.flag("echo") else []
        scored = list(map(_text, envelope.prompts)) or [""] * len(prompts)
        texts = [each if isinstance(each, str) else text for each, text in zip(prompts, scored, strict=True)]
        self._echoes = [text for text in texts for _ in range(self._n)] or [""] * len(self.answers)
        self._n_before = [max(len(text) - len(echo), 0) for text, echo in zip(scored, texts, strict=True)]
        self._has_logprobs = fields.data.get("logprobs") is not None
        self._offsets = [self._new_offsets(index) for index in range(len(self.answers))]
        self._texts = [TextEvent(self._chunk(index, PLACE)) for index in range(len(self.answers))]

    def _count_prompts(self, fields: Fields) -> int:
        return len(read_prompts(fields))

    def begin(self) -> bytes:
        """Return the prompts, if the client wants them repeated; otherwise a comment, since there is nothing to say."""
        if not any(self._echoes):
            return SSE_COMMENT
        return b"".join(self._chunk(index, echo, is_prompt=True) for index, echo in enumerate(self._echoes))

    def part(self, choice: int, part: AnswerPart) -> bytes:
        if part.logprobs:
            return self._chunk(choice, part.text, part.logprobs)
        return self._texts[choice].with_text(part.text)  # there is only text without a template

    def finished(self, choice: int) -> bytes:
        return self._empty_chunk(choice, {} if self._has_usage else self._timings(choice))

    def _empty_chunk(self, index: int, more: dict[str, Any]) -> bytes:
        return self._chunk(index, "", more=more)

    def end(self) -> bytes:
        return self._end(_KIND)

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.answers):
            offsets = self._new_offsets(index)
            prompt, own = self._prompt_logprobs(index, offsets), offsets.logprobs(answer.text_logprobs)
            joined = {name: [*prompt.get(name, ()), *values] for name, values in own.items()}
            has_logprobs = bool(prompt or answer.text_logprobs)
            choices.append(self._choice(index, self._echoes[index] + answer.text, joined if has_logprobs else None))
        return {**self._head(_KIND), "choices": choices, "usage": self._usage(), **self._timings(0)}

    def _new_offsets(self, index: int) -> TextOffsets:
        return TextOffsets(self._n_before[index // self._n] if self._n_before else 0)

    def _prompt_logprobs(self, index: int, offsets: TextOffsets) -> dict[str, Any]:
        """Return the log-probabilities of the prompt of an answer, none if they were not requested."""
        prompts = self._envelope.prompts if self._has_logprobs else ()
        return offsets.prompt_logprobs(prompts[index // self._n]) if prompts else {}

    def _chunk(
        self,
        index: int,
        text: str,
        tokens: Sequence[TokenLogprob] = (),
        *,
        is_prompt: bool = False,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        offsets = self._offsets[index]
        logprobs = self._prompt_logprobs(index, offsets) if is_prompt else offsets.logprobs(tokens) if tokens else None
        data = {**self._head(_KIND), "choices": [self._choice(index, text, logprobs or None)], **more}
        return sse_event({**data, "usage": None} if self._has_usage else data)

    def _choice(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        reason = finish_reason(self.answers[index])
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _text(tokens: Sequence[TokenLogprob]) -> str:
    return b"".join(bytes(token.bytes) for token in tokens).decode("utf-8", "replace")


writer = TextWriter

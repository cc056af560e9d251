"""llama-server's own completions: /completion, and /infill, which fills a gap. Pure; see llmrun.server.answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.answer import logprob_entries
from llmrun.protocol.arguments import MOST_TOP_LOGPROBS
from llmrun.protocol.messages import AnswerPart, AnswerRequest, Stats
from llmrun.server.answer import PLACE, AnswerWriter, CompletionRequest, Envelope, TextEvent, sse_event
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai import completion_of_several, error_body
from llmrun.server.protocols.openai_text import read_prompts
from llmrun.server.protocols.options import read_grammar_fields, read_limits

_STOP_TYPES = {"stop": "eos", "stop_string": "word", "length": "limit"}


def read(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the request of a body of /completion.

    Raises:
        UsageError, BadGrammarError: a field is invalid.
    """
    fields = Fields(body)
    prompts = read_prompts(fields)
    if len(prompts) > 1:
        raise UsageError(f"prompt must be one prompt, not {len(prompts)}", hint="/v1/completions takes several")
    (prompt,) = prompts
    if isinstance(prompt, str):
        return _request(fields, AnswerRequest(prompt=prompt, **_options(fields)))
    return _request(fields, AnswerRequest(prompt="", prompt_tokens=prompt, **_options(fields)))


def read_infill(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the request of a body of /infill. Raises as read()."""
    fields = Fields(body)
    prefix = (fields.text("input_prefix") or "") + (fields.text("prompt") or "")
    suffix = fields.text("input_suffix") or ""
    return _request(fields, AnswerRequest(prompt=prefix, suffix=suffix, **_options(fields)))


def _options(fields: Fields) -> dict[str, Any]:
    return {
        "limits": read_limits(fields, "n_predict", "max_tokens"),
        "grammar": read_grammar_fields(fields),
        "logprobs": fields.whole("n_probs", 0, MOST_TOP_LOGPROBS) or None,
    }


def _request(fields: Fields, request: AnswerRequest) -> CompletionRequest:
    if fields.value("n") not in (None, 1):
        raise UsageError("n can't be used", why="an answer has one text here", hint="/v1/completions takes it")
    return completion_of_several(fields, request)


class NativeWriter(AnswerWriter):
    """Writes an answer in llama-server's form."""

    def __init__(self, body: Mapping[str, Any], envelope: Envelope) -> None:
        super().__init__()
        self._envelope = envelope
        self._prompt = body.get("prompt", "")
        self._text = TextEvent(sse_event(_piece(PLACE)))

    def part(self, choice: int, part: AnswerPart) -> bytes:
        if not part.logprobs:
            return self._text.with_text(part.text)  # there is only text without a template
        return sse_event(_piece(part.text) | {"completion_probabilities": logprob_entries(part.logprobs)})

    def end(self) -> bytes:
        return sse_event(self._summary(""))

    def error(self, error: LlmrunError) -> bytes:
        return sse_event(error_body(error, error.http_status))

    def whole(self) -> dict[str, Any]:
        tokens = self.answers[0].text_logprobs
        probabilities = {"completion_probabilities": logprob_entries(tokens)} if tokens else {}
        return self._summary(self.answers[0].text) | probabilities

    def _summary(self, text: str) -> dict[str, Any]:
        answer, stats = self.answers[0], self.answers[0].stats
        return {
            **_piece(text),
            "stop": True,
            "model": self._envelope.model,
            "prompt": self._prompt,
            "tokens_predicted": stats.completion_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "tokens_cached": stats.reused_tokens,
            "truncated": False,
            "stop_type": _STOP_TYPES.get(answer.reason, "none"),
            "stopping_word": answer.stop,
            "timings": _timings(stats),
        }


def _piece(text: str) -> dict[str, Any]:
    return {"index": 0, "content": text, "tokens": [], "stop": False, "id_slot": -1}


def _timings(stats: Stats) -> dict[str, Any]:
    return {
        "prompt_n": stats.prompt_tokens - stats.reused_tokens,
        "prompt_ms": 1000 * stats.prefill_seconds,
        "prompt_per_second": stats.prefill_rate,
        "predicted_n": stats.completion_tokens,
        "predicted_ms": 1000 * stats.decode_seconds,
        "predicted_per_second": stats.decode_rate,
        "cache_n": stats.reused_tokens,
        "ttft_ms": 1000 * stats.ttft_seconds,
        "predicted_per_step": stats.tokens_per_step,
        **(
            {"draft_n": stats.drafted_tokens, "draft_n_accepted": stats.accepted_tokens} if stats.drafted_tokens else {}
        ),
    }

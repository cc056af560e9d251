"""llama-server's own completions: /completion, and /infill, which fills a gap. Pure; see llmrun.server.answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from llmrun.errors import LlmrunError
from llmrun.protocol.answer import logprob_entries
from llmrun.protocol.arguments import MOST_TOP_LOGPROBS
from llmrun.protocol.messages import AnswerRequest, Event, TextDelta, TokenLogprob, fields_with
from llmrun.server.answer import CompletionRequest, Envelope, sse_event
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai import completion_of_several, error_body, n_answers
from llmrun.server.protocols.openai_text import read_prompts, request_for
from llmrun.server.protocols.options import read_grammar_fields, read_limits, read_request_fields
from llmrun.server.protocols.timings import ProgressWriter, generation_settings, timings

_STOP_TYPES = {"stop": "eos", "stop_string": "word", "length": "limit"}


def read(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the request of a body of /completion.

    Raises:
        UsageError, BadGrammarError: a field is invalid.
    """
    fields = Fields(body)
    first, *others = (request_for(prompt, **_options(fields)) for prompt in read_prompts(fields))
    completion = completion_of_several(fields, first)
    adapters = completion.request.adapters
    return completion._replace(others=tuple(replace(each, adapters=adapters) for each in others))


def read_infill(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the request of a body of /infill. Raises as read()."""
    fields = Fields(body)
    prefix = (fields.text("input_prefix") or "") + (fields.text("prompt") or "")
    suffix = fields.text("input_suffix") or ""
    return completion_of_several(fields, AnswerRequest(prompt=prefix, suffix=suffix, **_options(fields)))


def _options(fields: Fields) -> dict[str, Any]:
    n_probs = fields.whole("n_probs", 0, MOST_TOP_LOGPROBS) or None
    _response_fields(fields)
    return {
        "limits": read_limits(fields, "n_predict", "max_tokens"),
        "grammar": read_grammar_fields(fields),
        "logprobs": n_probs,
        "processed_logprobs": n_probs is not None and fields.flag("post_sampling_probs") is True,
        "token_ids": fields.flag("return_tokens") is True or fields.flag("stream") is True,
        **read_request_fields(fields, fields_with(needs_template=False)),
    }


def _response_fields(fields: Fields) -> tuple[str, ...]:
    """Return the paths of the fields of an answer that the client wants, all if there are none."""
    return fields.texts("response_fields")


class NativeWriter(ProgressWriter):
    """Writes answers in llama-server's form: the raw text, with tags of reasoning."""

    def __init__(self, body: Mapping[str, Any], envelope: Envelope) -> None:
        fields = Fields(body)
        self._envelope, self._is_stream = envelope, fields.flag("stream") is True
        n_prompts = len(read_prompts(fields)) if fields.value("prompt") is not None else 1  # /infill may have none
        self._prompts = body["prompt"] if n_prompts > 1 else [body.get("prompt", "")]
        self._n = n_answers(fields)
        self._wanted = _response_fields(fields)
        self._is_processed = fields.flag("post_sampling_probs") is True
        super().__init__(fields, self._n * n_prompts)
        self._texts: list[list[str]] = [[] for _ in self.answers]

    def feed(self, choice: int, event: Event) -> bytes:
        if type(event) is not TextDelta:
            return super().feed(choice, event)
        self.answers[choice].take(event)
        self._texts[choice].append(event.text)
        if not self._is_stream:
            return b""
        piece = {**self._piece(choice, event.text, event.ids), "stop": False}
        return sse_event({**piece, **self._probabilities(event.logprobs)})

    def _empty_chunk(self, index: int, more: dict[str, Any]) -> bytes:
        return sse_event({**self._piece(index, "", ()), "stop": False, **more})

    def finished(self, choice: int) -> bytes:
        return sse_event(self._selected(self._last(choice, "", ())))

    def end(self) -> bytes:
        return b""

    def error(self, error: LlmrunError) -> bytes:
        return sse_event(error_body(error, error.http_status))

    def whole(self) -> Any:
        """Return the answer, or a list of several."""
        answers = [
            self._selected(
                {
                    **self._last(choice, "".join(self._texts[choice]), answer.ids),
                    **self._probabilities(answer.logprobs),
                }
            )
            for choice, answer in enumerate(self.answers)
        ]
        return answers if len(answers) > 1 else answers[0]

    def _piece(self, choice: int, text: str, ids: Iterable[int]) -> dict[str, Any]:
        return {"index": choice, "content": text, "tokens": list(ids), "id_slot": -1}

    def _last(self, choice: int, text: str, ids: Iterable[int]) -> dict[str, Any]:
        """Return the end of an answer."""
        answer, stats = self.answers[choice], self.answers[choice].stats
        seed = answer.started.seed if answer.started is not None else None
        return {
            **self._piece(choice, text, ids),
            "stop": True,
            "model": self._envelope.model,
            "prompt": self._prompts[choice // self._n],
            "tokens_predicted": stats.completion_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "tokens_cached": stats.reused_tokens,
            "generation_settings": generation_settings(self.requests.get(choice), seed=seed, stream=self._is_stream),
            "has_new_line": any("\n" in each for each in self._texts[choice]),
            "truncated": False,
            "stop_type": _STOP_TYPES.get(answer.reason, "none"),
            "stopping_word": answer.stop,
            "timings": timings(stats),
        }

    def _selected(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of an answer that the client wants; "a/b" is the field b of the object a."""
        found: dict[str, Any] = {}
        for path in self._wanted:
            value: Any = answer
            for name in path.split("/"):
                value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
            if value is not _MISSING:
                found[path] = value
        return found if self._wanted else answer

    def _probabilities(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return the field with the log-probabilities of tokens, or the probabilities by which they were drawn."""
        entries = logprob_entries(tokens)
        if self._is_processed:
            for entry in entries:
                entry["top_probs"] = [*map(_as_probability, entry.pop("top_logprobs"))]
            entries = [*map(_as_probability, entries)]
        return {"completion_probabilities": entries} if entries else {}


_MISSING = object()


def _as_probability(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a token with its probability instead of the logarithm."""
    probability = math.exp(entry.pop("logprob"))
    return {**entry, "prob": probability}

"""llama-server's figures of an answer, in its own completions and in OpenAI's: times, progress, settings. Pure."""

from __future__ import annotations

import math
from abc import abstractmethod
from importlib.metadata import version
from typing import Any

from llmrun.protocol.messages import AnswerRequest, PrefillProgress, Started, Stats
from llmrun.protocol.params import DEFAULTS, PARAMETERS, SamplingParams
from llmrun.server.answer import AnswerWriter
from llmrun.server.protocols.fields import Fields

FINGERPRINT = f"llmrun-{version('llmrun')}"
"""What computes, in the fields for that: system_fingerprint, build_info."""
_RANDOM_SEED = 2**32 - 1  # a new one for each answer
_SAMPLERS = {"typical_p": "typ_p"}  # names of steps that are others in llama-server
_ABSENT = {"adaptive_target": -1.0, "adaptive_decay": 0.9, "n_keep": 0, "n_discard": 0, "min_keep": 0}
"""Settings of llama-server that do not exist here, with the values that switch them off."""


def timings(stats: Stats) -> dict[str, Any]:
    """Return the times of an answer; llmrun's own fields come last."""
    n_prompt, n_predicted = stats.prompt_tokens - stats.reused_tokens, stats.completion_tokens
    drafts = {"draft_n": stats.drafted_tokens, "draft_n_accepted": stats.accepted_tokens}
    return {
        "cache_n": stats.reused_tokens,
        "prompt_n": n_prompt,
        "prompt_ms": 1000 * stats.prefill_seconds,
        "prompt_per_token_ms": 1000 * stats.prefill_seconds / max(n_prompt, 1),
        "prompt_per_second": stats.prefill_rate,
        "predicted_n": n_predicted,
        "predicted_ms": 1000 * stats.decode_seconds,
        "predicted_per_token_ms": 1000 * stats.decode_seconds / max(n_predicted, 1),
        "predicted_per_second": stats.decode_rate,
        **(drafts if stats.drafted_tokens else {}),
        "ttft_ms": 1000 * stats.ttft_seconds,
        "predicted_per_step": stats.tokens_per_step,
    }


def prompt_progress(started: Started, progress: PrefillProgress | None = None) -> dict[str, Any]:
    """Return how much of a prompt is in the KV cache, at the start or after a batch."""
    n_computed, seconds = (0, 0.0) if progress is None else (progress.tokens, progress.seconds)
    return {
        "total": started.prompt_tokens,
        "cache": started.reused_tokens,
        "processed": started.reused_tokens + n_computed,
        "time_ms": 1000 * seconds,
    }


class ProgressWriter(AnswerWriter):
    """A writer that tells how much of a prompt is computed, if `return_progress` requests it."""

    def __init__(self, fields: Fields, n_answers: int) -> None:
        super().__init__(n_answers)
        self._has_progress = fields.flag("return_progress") is True

    def started(self, choice: int) -> bytes:
        return self._told(choice, None)

    def progress(self, choice: int, progress: PrefillProgress) -> bytes:
        return self._told(choice, progress)

    def _told(self, choice: int, progress: PrefillProgress | None) -> bytes:
        started = self.answers[choice].started
        if not self._has_progress or started is None:
            return b""
        return self._empty_chunk(choice, {"prompt_progress": prompt_progress(started, progress)})

    @abstractmethod
    def _empty_chunk(self, index: int, more: dict[str, Any]) -> bytes:
        """Return a chunk with nothing of an answer, and more fields."""


def generation_settings(
    request: AnswerRequest | None = None,
    sampling: SamplingParams = DEFAULTS,
    *,
    seed: int | None = None,
    stream: bool = False,
) -> dict[str, Any]:
    """Return the settings of an answer, or those of requests that set nothing.

    Args:
        request: as the engine got it; its sampling counts.
        sampling: of requests that set nothing.
        seed: of the answer's random generator.
    """
    request = AnswerRequest(sampling=sampling) if request is None else request
    sampling, limits = request.sampling, request.limits
    values: dict[str, Any] = {
        row.servers["llamacpp"] or name: getattr(sampling, name)
        for name, row in PARAMETERS.items()
        if "llamacpp" in row.servers
    }
    n_predict = -1 if limits.max_tokens is None else limits.max_tokens
    return {
        **values,
        "seed": next((each for each in (seed, sampling.seed) if each is not None), _RANDOM_SEED),
        "dry_sequence_breakers": list(sampling.dry_breakers),
        "logit_bias": [
            {"token": token, "bias": None if bias == -math.inf else bias} for token, bias in sampling.logit_bias
        ],
        "samplers": [_SAMPLERS.get(step, step) for step in sampling.order],
        "stop": list(limits.stop),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "ignore_eos": limits.ignores_end,
        "stream": stream,
        "n_probs": request.logprobs or 0,
        "post_sampling_probs": request.processed_logprobs,
        "grammar": "" if request.grammar is None else request.grammar.text,
        "lora": [{"id": number, "scale": scale} for number, scale in request.adapters or ()],
        "timings_per_token": False,
        **_ABSENT,
    }

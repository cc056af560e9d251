"""The time to first token, inter-token latency and decode time of one sequence, and the prefill rate of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from llmrun.engine.core.policy import POLICY, Policy

Phase = Literal["template", "tokenize", "grammar"]


class PreparationClock:
    """Measures the parts of one preparation after the other. A part inside of another counts for itself only."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        """Begin a preparation, with its tokenizing."""
        self._phase: Phase = "tokenize"
        self._seconds: dict[Phase, float] = {"template": 0.0, "tokenize": 0.0, "grammar": 0.0}
        self._began = self._since = self._clock()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Count the block for a part."""
        outer = self._switch(phase)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, phase: Phase) -> Phase:
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        outer, self._phase, self._since = self._phase, phase, now
        return outer

    def end(self, arrived: float) -> Metrics:
        """Return the metrics of the request so far.

        Args:
            arrived: when the request arrived; 0 is the beginning of this preparation.
        """
        self._switch("tokenize")
        seconds = self._seconds
        arrived = min(arrived or self._began, self._began)
        return Metrics(arrived, seconds["template"], seconds["tokenize"], seconds["grammar"])


@dataclass(slots=True)
class Metrics:
    """Timestamps of one sequence, in seconds of one monotonic clock."""

    arrived: float = 0.0
    # Parts of the preparation, between the arrival and the loop.
    template_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    grammar_seconds: float = 0.0
    admitted: float | None = None  # when it got a slot for the first time
    prefill_seconds: float = 0.0  # in decode calls with prompt tokens of this sequence
    model_seconds: float = 0.0  # in decode calls after the first token
    token_times: list[float] = field(default_factory=list)  # when each token was sampled

    def record_decode(self, seconds: float) -> None:
        """Account for a decode call with tokens of this sequence."""
        if self.token_times:
            self.model_seconds += seconds
        else:
            self.prefill_seconds += seconds

    def record_token(self, now: float) -> None:
        self.token_times.append(now)

    def retract(self, n_tokens: int) -> None:
        """Forget the last tokens; their cost counts for the ones that replace them."""
        del self.token_times[len(self.token_times) - n_tokens :]

    @property
    def queue_seconds(self) -> float:
        """Time from the arrival to the first slot, without the preparation."""
        if self.admitted is None:
            return 0.0
        preparation = self.template_seconds + self.tokenize_seconds + self.grammar_seconds
        return max(0.0, self.admitted - self.arrived - preparation)

    @property
    def ttft_seconds(self) -> float:
        return self.token_times[0] - self.arrived if self.token_times else 0.0

    @property
    def decode_seconds(self) -> float:
        """Time from the first sampled token to the last."""
        return self.token_times[-1] - self.token_times[0] if self.token_times else 0.0

    @property
    def overhead_seconds(self) -> float:
        """The part of decode_seconds outside decode calls, per token."""
        steps = len(self.token_times) - 1
        return max(0.0, self.decode_seconds - self.model_seconds) / steps if steps > 0 else 0.0

    def itl_quantile(self, q: float) -> float:
        """Return a quantile of the inter-token latency; 0 with fewer than two tokens."""
        from llmrun.statistics import quantile  # brings the standard library's, for which no first token should wait

        gaps = sorted(after - before for before, after in pairwise(self.token_times))
        return quantile(gaps, q) if gaps else 0.0


class PrefillRate:
    """A moving average of the prefill speed, over the batches that contain prefill: tokens in the time beyond a step.

    Decoding sequences in such a batch take the time of a step without prefill anyway.
    """

    _MIN_SHARE = 0.25  # of a mixed batch's time counts for prefill: a step may have been slow by accident

    def __init__(self, policy: Policy = POLICY) -> None:
        self._policy = policy
        self._rate = 0.0  # tokens/s
        self.step_seconds = 0.0  # of a step without prefill; 0 before the first

    def record(self, n_tokens: int, seconds: float, n_decoding: int = 0) -> None:
        """Account for a batch with n_tokens of prompts, and tokens of n_decoding sequences that decode.

        It weighs half, because prefill gets slower towards the end of a long prompt.
        """
        if n_tokens < self._policy.few_tokens:
            self.step_seconds = (self.step_seconds + seconds) / 2 if self.step_seconds else seconds
            return
        if n_decoding:
            seconds = max(seconds - self.step_seconds, self._MIN_SHARE * seconds)
        rate = n_tokens / max(seconds, 1e-6)
        self._rate = (self._rate + rate) / 2 if self._rate else rate

    def tokens_within(self, seconds: float) -> int:
        """Return how many tokens can be prefilled in a time; those of a wide batch before the first measurement."""
        multiple = self._policy.few_tokens
        if not self._rate:
            return self._policy.wide_batch
        return max(multiple, int(self._rate * seconds) // multiple * multiple)

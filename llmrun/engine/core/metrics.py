"""TTFT, inter-token latency and tokens/s of one sequence, and how fast prefill is. Knows no clock of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Metrics:
    """Timestamps of one sequence, in seconds of one monotonic clock.

    Attributes:
        arrived: when the request came in.
        prefill_seconds: inside decode calls that still held prompt tokens of this sequence.
        model_seconds: inside decode calls after the first token.
        token_times: when each token had been sampled.
    """

    arrived: float
    prefill_seconds: float = 0.0
    model_seconds: float = 0.0
    token_times: list[float] = field(default_factory=list)

    def computed(self, seconds: float) -> None:
        """A decode call with tokens of this sequence took this long."""
        if self.token_times:
            self.model_seconds += seconds
        else:
            self.prefill_seconds += seconds

    def sampled(self, now: float) -> None:
        """A token was sampled now."""
        self.token_times.append(now)

    def retracted(self, tokens: int) -> None:
        """The last tokens were taken back; what they cost counts for those that come in their place."""
        del self.token_times[len(self.token_times) - tokens :]

    @property
    def ttft_seconds(self) -> float:
        """Time to first token; 0 when there is none."""
        return self.token_times[0] - self.arrived if self.token_times else 0.0

    @property
    def decode_seconds(self) -> float:
        """From the first sampled token to the last."""
        return self.token_times[-1] - self.token_times[0] if self.token_times else 0.0

    @property
    def overhead_seconds(self) -> float:
        """Of decode_seconds, what a token spent outside decode calls."""
        steps = len(self.token_times) - 1
        return max(0.0, self.decode_seconds - self.model_seconds) / steps if steps > 0 else 0.0

    def itl_quantile(self, q: float) -> float:
        """Inter-token latency that a share q of the gaps does not exceed (nearest rank); 0 with no gap."""
        times = self.token_times
        gaps = sorted(after - before for before, after in pairwise(times))
        return gaps[max(0, math.ceil(q * len(gaps)) - 1)] if gaps else 0.0


class PrefillRate:
    """How many tokens go through the model in a given time, by the last batches in which some prefilled."""

    LEAST = 8
    """Tokens of a piece of a prompt: fewer would cost almost as much, because all weights are read for them too."""

    def __init__(self) -> None:
        self._rate = 0.0  # tokens/s

    def computed(self, n_tokens: int, seconds: float) -> None:
        """A batch took this long. Half of the figure is the newest one's: what is far behind in a prompt is slower."""
        rate = n_tokens / max(seconds, 1e-6)
        self._rate = (self._rate + rate) / 2 if self._rate else rate

    def tokens_within(self, seconds: float) -> int:
        """A multiple of 8, at least that; 64 before anything was measured."""
        return max(self.LEAST, int(self._rate * seconds) // self.LEAST * self.LEAST) if self._rate else 64

"""Speculation: tokens drafted ahead and verified by one decode step, and the times of such steps.

Named tuples for the reason given in messages.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class StepTime(NamedTuple):
    """The time of one decode step on this machine, with this model and these engine settings."""

    width: int  # rows of logits; 1 is plain decoding
    depth: int  # tokens in the KV cache before the step
    seconds: float  # wall clock, a median


class StepTimes:
    """Step times, interpolated between the measured widths."""

    def __init__(self, times: Sequence[StepTime]) -> None:
        by_width: dict[int, list[StepTime]] = {}
        for time in sorted(times):
            by_width.setdefault(time.width, []).append(time)
        self.widths = tuple(by_width)  # measured
        self._lines: dict[float, tuple[float, float]] = {width: _line(each) for width, each in by_width.items()}

    @property
    def lines(self) -> list[tuple[int, float, float]]:
        """For each measured width: seconds at depth 0, and seconds that each token in the KV cache adds."""
        return [(width, *self._lines[width]) for width in self.widths]

    def seconds(self, width: float, depth: int) -> float:
        """Return the time of a step with this many rows, after this many tokens in the KV cache."""
        if width in self._lines:
            start, slope = self._lines[width]
            return start + slope * depth
        for low, high in pairwise(self.widths):
            if low < width < high:
                fast, slow = self.seconds(low, depth), self.seconds(high, depth)
                return fast + (slow - fast) * (width - low) / (high - low)
        return self.seconds(self.widths[0 if width < self.widths[0] else -1], depth)


def _line(measured: Sequence[StepTime]) -> tuple[float, float]:
    """Return the seconds at depth 0, and the seconds that each token in the KV cache adds."""
    first, last = measured[0], measured[-1]
    slope = max(0.0, last.seconds - first.seconds) / max(1, last.depth - first.depth)
    return first.seconds - slope * first.depth, slope


class Speculation(NamedTuple):
    """Limits of speculative decoding, which never changes an answer.

    The number of drafted tokens depends on the tokens and on these fields, never on a clock, so that answers can be
    replayed.
    """

    most: int  # maximum drafted tokens per step
    times: tuple[StepTime, ...] = ()  # draft only as many tokens as pay by these; without any, `most`
    draft_times: tuple[StepTime, ...] = ()  # of the draft model's steps, measured or estimated
    # Draft in some steps only to measure those whose `times` are missing; StepsMeasured comes before Finished. When it
    # does depends on the clock.
    probes: bool = False


class AttentionTime(NamedTuple):
    """The seconds of a plain decode step of one sequence with flash attention and without, after `depth` tokens."""

    depth: int
    on: float
    off: float


class VariantTime(NamedTuple):
    """The seconds that a variant of the processor's backend takes for a token, per byte of one type of weights."""

    type: str  # ggml's name, e.g. "Q4_K"
    variant: str  # e.g. "haswell"
    decode: float
    prefill: float


class StepTables(NamedTuple):
    """Step times, and those of the draft model; none if unknown."""

    times: tuple[StepTime, ...] = ()
    draft_times: tuple[StepTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()  # flash attention compared
    variants: tuple[VariantTime, ...] = ()  # those of the processor compared; of each type, ggml's choice first


class StepsMeasured(NamedTuple):
    """The step times of an answer with Speculation.probes; before its Finished."""

    request: int
    times: tuple[StepTime, ...]

"""Speculation: tokens guessed in advance, verified by one decode step, and how long such steps take.

Records like those of messages.py, which says what all of them have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class StepTime(NamedTuple):
    """How long one decode step takes on this machine, with this model and these settings of the engine.

    Attributes:
        width: rows of logits that it gives: 1 is plain decoding.
        depth: tokens in the KV cache before it.
        seconds: wall clock, a median.
    """

    width: int
    depth: int
    seconds: float


class StepTimes:
    """How long a step takes, between and beyond what was measured.

    Attributes:
        widths: those that were measured.
    """

    def __init__(self, times: Sequence[StepTime]) -> None:
        by_width: dict[int, list[StepTime]] = {}
        for time in sorted(times):
            by_width.setdefault(time.width, []).append(time)
        self.widths = tuple(by_width)
        self._lines: dict[float, tuple[float, float]] = {width: _line(each) for width, each in by_width.items()}

    def seconds(self, width: float, depth: int) -> float:
        """Of a step with so many rows, behind so many tokens in the KV cache."""
        if width in self._lines:
            start, slope = self._lines[width]
            return start + slope * depth
        for low, high in pairwise(self.widths):
            if low < width < high:
                fast, slow = self.seconds(low, depth), self.seconds(high, depth)
                return fast + (slow - fast) * (width - low) / (high - low)
        return self.seconds(self.widths[0 if width < self.widths[0] else -1], depth)


def _line(measured: Sequence[StepTime]) -> tuple[float, float]:
    """Seconds at depth 0, and how much longer each token in the KV cache takes."""
    first, last = measured[0], measured[-1]
    slope = max(0.0, last.seconds - first.seconds) / max(1, last.depth - first.depth)
    return first.seconds - slope * first.depth, slope


class Speculation(NamedTuple):
    """How many tokens may be guessed in advance and verified in one step; the answer is chosen exactly as without.

    How many are drafted depends on the tokens and on this alone, never on a clock, so that an answer can be replayed.

    Attributes:
        most: drafted tokens a step.
        times: where they are known, a step drafts only as many as they say will pay; without any, always as many as
            can be had.
        draft_times: where there is a draft model, those of its steps, measured or estimated.
        probes: draft in some steps only to measure them; StepsMeasured comes before Finished.
    """

    most: int
    times: tuple[StepTime, ...] = ()
    draft_times: tuple[StepTime, ...] = ()
    probes: bool = False


class StepTables(NamedTuple):
    """Step times, and those of the draft model where there is one; none where they are not known."""

    times: tuple[StepTime, ...] = ()
    draft_times: tuple[StepTime, ...] = ()


class AttentionTime(NamedTuple):
    """The seconds of a plain decode step of one sequence with flash attention and without, after `depth` tokens."""

    depth: int
    on: float
    off: float


class MeasureSteps(NamedTuple):
    """How long decode steps of several widths take; answered by StepsMeasured.

    For when nobody waits for an answer: whatever else is asked ends it, and nothing was measured then.

    Attributes:
        attention: compare flash attention on and off, too.
    """

    request: int
    attention: bool = False


class StepsMeasured(NamedTuple):
    """What MeasureSteps found; nothing where something else was asked meanwhile, or the machine was too busy.

    Attributes:
        draft_times: of the draft model's steps, where there is one.
    """

    request: int
    times: tuple[StepTime, ...] = ()
    draft_times: tuple[StepTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()

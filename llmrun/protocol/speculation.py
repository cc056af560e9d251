"""Speculation: tokens guessed in advance, verified by one decode step, and how long such steps take.

Records like those of messages.py, which says what all of them have in common.
"""

from __future__ import annotations

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


class Speculation(NamedTuple):
    """How many tokens may be guessed in advance and verified in one step; the answer is chosen exactly as without.

    How many are drafted depends on the tokens and on this alone, never on a clock, so that an answer can be replayed.

    Attributes:
        most: drafted tokens a step.
        times: where they are known, a step drafts only as many as they say will pay; without any, always as many as
            can be had.
    """

    most: int
    times: tuple[StepTime, ...] = ()


class MeasureSteps(NamedTuple):
    """How long decode steps of several widths take; answered by StepsMeasured.

    For when nobody waits for an answer: whatever else is asked ends it, and nothing was measured then.
    """

    request: int


class StepsMeasured(NamedTuple):
    """What MeasureSteps found; nothing where something else was asked meanwhile."""

    request: int
    times: tuple[StepTime, ...]

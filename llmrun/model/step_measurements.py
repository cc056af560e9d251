"""Measurement of an engine's decode steps, for the use of drafts. Failures only mean that the times stay unknown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from llmrun.errors import LlmrunError
from llmrun.planning.speculation import DraftPolicy
from llmrun.protocol.questions import MEASURE_STEPS
from llmrun.protocol.speculation import StepTime
from llmrun.runner.client import EngineClient

_TRIES = 3


def measure_steps(engine: EngineClient, drafting: DraftPolicy, seconds: float | None = None) -> tuple[StepTime, ...]:
    """Measure and remember step times; () if other requests or a busy machine disturbed all tries.

    Args:
        seconds: time limit; after it the result is (), and the engine may have ended.
    """
    ends = None if seconds is None else time.monotonic() + seconds
    for _ in range(_TRIES):
        left = None if ends is None else ends - time.monotonic()
        if left is not None and left <= 0:
            break
        try:
            found = engine.do(MEASURE_STEPS, drafting.comparisons, seconds=left)
        except LlmrunError:
            if ends is None or time.monotonic() < ends:
                raise
            break
        if drafting.remember(found):
            return found.times
    return ()


@contextmanager
def measuring_steps(engine: EngineClient | None, drafting: DraftPolicy) -> Iterator[None]:
    """Measure while a block waits for something else, if times are missing."""
    look = None
    if engine is not None and engine.alive and (unmeasured := drafting.unmeasured) is not None:
        look = engine.begin(MEASURE_STEPS, unmeasured)
    yield
    with suppress(LlmrunError):  # it can't be written
        if look is not None and (found := look()) is not None:
            drafting.remember(found)

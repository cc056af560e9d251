"""Measurement of an engine's decode steps, for the use of drafts. Failures only mean that the times stay unknown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from llmrun.errors import LlmrunError
from llmrun.planning.speculation import DraftPolicy
from llmrun.protocol.questions import MEASURE_STEPS, MeasureSteps
from llmrun.protocol.speculation import StepTime
from llmrun.runner.client import EngineClient

_TRIES = 3


def measure_steps(engine: EngineClient, drafting: DraftPolicy) -> tuple[StepTime, ...]:
    """Measure and remember step times; () if other requests or a busy machine disturbed all tries."""
    for _ in range(_TRIES):
        found = engine.do(MEASURE_STEPS, MeasureSteps(drafting.lacks_attention))
        if drafting.remember(*found):
            return found.times
    return ()


@contextmanager
def measuring_steps(engine: EngineClient | None, drafting: DraftPolicy) -> Iterator[None]:
    """Measure while a block waits for something else, if times are missing."""
    look = None
    if engine is not None and engine.alive and (drafting.lacks_times or drafting.lacks_attention):
        look = engine.begin(MEASURE_STEPS, MeasureSteps(drafting.lacks_attention))
    yield
    with suppress(LlmrunError):  # it can't be written
        if look is not None and (found := look()) is not None:
            drafting.remember(*found)

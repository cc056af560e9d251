"""The job `limits`: the machine's peak memory bandwidth and peak multiply-add rates."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class MeasureLimits:
    """Measure with `threads` threads."""

    n_bytes: int  # read repeatedly: the size of the model, so that caches help equally
    threads: int
    seconds: float = 0.15  # for reading, and again for multiplying


@dataclass(frozen=True, slots=True)
class MeasuredLimits:
    """The machine's peak rates."""

    read: float  # bytes/s
    int8: float  # multiply-adds/s of 8-bit integers; 0 if the processor has no instruction that we use
    half: float  # of 16-bit floats
    single: float  # of 32-bit floats


LIMITS = JobKind("limits", MeasureLimits, Empty, MeasuredLimits)

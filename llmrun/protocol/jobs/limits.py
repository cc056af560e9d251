"""The job that measures what the machine could do at most: nothing but reading, and nothing but multiplying."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class MeasureLimits:
    """Measure with so many threads.

    Attributes:
        n_bytes: what is read again and again: as much as a model reads in turns, so that caches help as much.
        threads: that read and multiply.
        seconds: for reading, and for multiplying.
    """

    n_bytes: int
    threads: int
    seconds: float = 0.15


@dataclass(frozen=True, slots=True)
class MeasuredLimits:
    """What came out.

    Attributes:
        read: bytes/s.
        int8: multiply-adds/s of 8-bit integers; 0 where the processor has no instruction that we know.
        half: of 16-bit floats.
        single: of 32-bit floats.
    """

    read: float
    int8: float
    half: float
    single: float


LIMITS = JobKind("limits", MeasureLimits, Empty, MeasuredLimits)

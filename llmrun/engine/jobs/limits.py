"""The job `limits`: the machine's peak memory bandwidth and multiply-add rates, measured by native/limits.cpp."""

from __future__ import annotations

from collections.abc import Callable

from llmrun import _native
from llmrun.errors import OutOfMemoryError
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.limits import MeasuredLimits, MeasureLimits

_KINDS = ("int8", "half", "single")


def run(command: MeasureLimits, report: Callable[[Empty], None], flag: _native.CancelFlag) -> MeasuredLimits:
    """Measure.

    Raises:
        OutOfMemoryError: there is no memory for the buffer.
    """
    try:
        read = _native.read_rate(command.n_bytes, command.threads, command.seconds)
    except MemoryError:
        raise OutOfMemoryError(f"there is no memory for a buffer of {command.n_bytes:,} bytes") from None
    share = command.seconds / len(_KINDS)
    return MeasuredLimits(read, *(_native.multiply_add_rate(kind, command.threads, share) for kind in _KINDS))

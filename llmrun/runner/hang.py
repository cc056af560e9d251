"""Tells an engine that hangs from one that computes, or that a busy machine slows down. Must not know requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SILENT_SECONDS = 60.0
"""An engine that has to work, and uses no processor time for this long, hangs."""
_LONGEST_LOOK = 1.0  # that counts between two looks: this process or both may have been suspended


class HangDetector:
    """Watches the processor time that a process, or one of its threads, uses from now on.

    Time that passes is no limit: a process on a busy machine may need any multiple of it.

    Args:
        used: returns the seconds of processor time so far; None if they are unknown, and then it counts as working.
        seconds: of processor time that the work may take; several threads together count no more than the time passed.
    """

    def __init__(self, used: Callable[[], float | None], seconds: float = math.inf) -> None:
        self._used, self._seconds = used, seconds
        self._looked_at, self._before = time.monotonic(), used() or 0.0
        self._computed = self._rested = 0.0

    def look(self) -> str:
        """Return why the process hangs, "" if it does not. To be called several times a second."""
        now, used = time.monotonic(), self._used()
        passed = now - self._looked_at
        more = passed if used is None else used - self._before
        self._looked_at, self._before = now, self._before if used is None else used
        self._computed += min(more, passed)
        self._rested = 0.0 if more > 0 else self._rested + min(passed, _LONGEST_LOOK)
        if self._computed > self._seconds:
            return f"it took more than {self._seconds:.3g} seconds of processor time"
        if self._rested > SILENT_SECONDS:
            return f"it used no processor time for {SILENT_SECONDS:g} seconds"
        return ""

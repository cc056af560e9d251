"""Jobs in slices between decode steps, of about a step's time while answers run, so that their tokens keep coming.

Must not know the jobs, the pipe or llama.cpp.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from llmrun.engine.core.metrics import PrefillRate

_SHORTEST, _LONGEST = 0.01, 0.1  # seconds of a slice while answers run: the first decode of a batch costs time too

Slices = Generator[None, None, Any]
"""A job that returns its result and yields between two slices; up to its first yield, it runs beside the steps."""


class SlicedJob(NamedTuple):
    """A job that was begun."""

    request: int
    slices: Slices


class TimeShare:
    """How many tokens a slice computes.

    Attributes:
        seconds: of the last step of the answers that run; None without any.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._rate, self._is_measured = PrefillRate(), False

    def tokens(self, most: int) -> int:
        """Return the number of tokens for the next slice, at most `most`."""
        if self.seconds is None:
            return most
        if not self._is_measured:
            return min(most, PrefillRate.MIN_TOKENS)
        return min(most, self._rate.tokens_within(min(max(self.seconds, _SHORTEST), _LONGEST)))

    @contextmanager
    def measured(self, n_tokens: int) -> Iterator[None]:
        """Measure the speed of the block, which computes these tokens."""
        began = time.perf_counter()
        yield
        self._rate.record(n_tokens, time.perf_counter() - began)
        self._is_measured |= n_tokens >= PrefillRate.MIN_TOKENS

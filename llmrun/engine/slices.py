"""Jobs in slices between decode steps, of about a step's time while answers run, so that their tokens keep coming.

Must not know the jobs, the pipe or llama.cpp.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_SHORTEST = 0.01  # seconds of a slice while answers run
_CLOSE = 1.5  # times as long as a step, or as short, is near enough
_FIRST, _FEWEST, _MOST = 64, 8, 2048  # tokens of a slice

Slices = Generator[None, None, Any]
"""A job that returns its result and yields between two slices; up to its first yield, it runs beside the steps."""


class SlicedJob(NamedTuple):
    """A job that was begun."""

    request: int
    slices: Slices


class TimeShare:
    """The number of tokens of a slice: as many as take about the time of a step of the answers.

    The number is doubled and halved, not computed from a speed: a step of few tokens takes nearly as long as one of a
    single token, so small slices look slow, and would be made smaller still.

    Attributes:
        seconds: of the last step of the answers that run; None without any.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._n_tokens = _FIRST

    def tokens(self, most: int) -> int:
        """Return the number of tokens for the next slice, at most `most`."""
        return most if self.seconds is None else min(most, self._n_tokens)

    @contextmanager
    def measured(self, n_tokens: int) -> Iterator[None]:
        """Measure the time of the block, which computes these tokens."""
        began = time.perf_counter()
        yield
        if self.seconds is not None and 2 * n_tokens > self._n_tokens:
            share = (time.perf_counter() - began) / max(self.seconds, _SHORTEST)
            if share < 1 / _CLOSE:
                self._n_tokens = min(2 * self._n_tokens, _MOST)
            elif share > _CLOSE:
                self._n_tokens = max(self._n_tokens // 2, _FEWEST)

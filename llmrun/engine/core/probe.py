"""The measurement of decode steps within an answer, for machines on which nothing was measured yet.

Some steps of the answer verify a draft of a fixed width. It is verified as ever, so the answer is the same. Which steps
have one depends on their number alone, so a repeated request takes the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from llmrun._native import StepShape
from llmrun.engine.core.steps import WIDTHS, raise_if_disturbed
from llmrun.engine.llama.base import Aborted
from llmrun.protocol.speculation import StepTime

_WARM_UP = 4  # steps
_ROUNDS = 2  # of all widths
_CYCLE = 12  # steps: a plain, a wide and a plain one to measure, then others, so that the answer is hardly slower
_N_CYCLES = _ROUNDS * len(WIDTHS)


class StepProbe:
    """Drafts for the steps to measure; the interface of drafts.Drafting."""

    model = None
    is_native = False

    def __init__(self) -> None:
        self._n_steps = 0
        self._width = self._depth = 0  # of the planned step; width 0 without one
        self._draft: list[int] = []
        self._seconds: dict[int, tuple[int, int, float]] = {}  # number of the step -> width, depth, seconds

    def plan(self, tokens: Sequence[int], limit: int, step: StepShape) -> int:
        """Plan a step as Drafting.plan()."""
        number, self._depth = self._n_steps - _WARM_UP, step.depth
        width = WIDTHS[number // _CYCLE % len(WIDTHS)] if number in range(1, _CYCLE * _N_CYCLES, _CYCLE) else 1
        self._width = width if step.rows == 1 and limit >= width - 1 else 0
        self._draft = [tokens[-1]] * (self._width - 1)  # almost never right
        return len(self._draft)

    def take(self, count_allowed: Callable[[list[int]], int]) -> list[int]:
        """Return the draft, nothing if the grammar does not allow all of it."""
        if self._draft and count_allowed(self._draft) < len(self._draft):
            self._draft, self._width = [], 0
        return self._draft

    def record(self, seconds: float) -> None:
        """Account for a decode call."""
        if self._width:
            self._seconds[self._n_steps - _WARM_UP] = self._width, self._depth, seconds
            self._n_steps += 1
            self._width = 0

    def times(self) -> tuple[StepTime, ...]:
        """Return the step times; none if the answer was too short, or the machine busy."""
        steps = [self._seconds.get(_CYCLE * cycle + step) for cycle in range(_N_CYCLES) for step in range(3)]
        plain: list[float] = []
        wide: dict[int, list[float]] = {width: [] for width in WIDTHS}
        for triple in zip(steps[::3], steps[1::3], steps[2::3], strict=True):
            if None in triple:
                return ()
            (_, _, before), (width, _, seconds), (_, _, after) = (each for each in triple if each is not None)
            plain += [before]
            wide[width].append(seconds + max(0.0, after - before))  # llama.cpp rebuilds its graph twice
        try:
            raise_if_disturbed(plain)
        except Aborted:
            return ()
        depth = max(each[1] for each in steps if each is not None)
        found = [(1, plain), *wide.items()]
        return tuple(StepTime(width, depth, median(seconds)) for width, seconds in found)

    def rewind(self, length: int) -> None: ...

    def close(self) -> None: ...

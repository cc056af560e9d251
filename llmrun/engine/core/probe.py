"""The measurement of decode steps within an answer, for machines on which nothing was measured yet.

Some steps of the answer verify a draft of a fixed width. It is verified as ever, so the answer is the same. Which steps
have one depends on their number alone, so a repeated request takes the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from llmrun._native import StepShape
from llmrun.engine.core.steps import raise_if_disturbed
from llmrun.engine.llama.base import Aborted
from llmrun.protocol.messages import DraftSource
from llmrun.protocol.speculation import StepTime

_WIDTHS = (4, 8, 16)  # rows of a step
_WARM_UP = 4  # steps
_ROUNDS = 2  # of all widths
_CYCLE = 12  # steps: a plain, a wide and a plain one to measure, then others, so that the answer is hardly slower


class StepProbe:
    """Drafts for the steps to measure; the interface of drafts.Drafting."""

    model = None
    is_native = False
    source: DraftSource = "probe"
    probabilities: Sequence[float] = ()

    def __init__(self, most: int = max(_WIDTHS) - 1) -> None:
        """Start.

        Args:
            most: drafted tokens of a step.
        """
        self._widths = [width for width in _WIDTHS if width <= most + 1]
        self._n_cycles = _ROUNDS * len(self._widths)
        self._n_steps = 0
        self._width = self._depth = 0  # of the planned step; width 0 without one
        self._draft: list[int] = []
        self._seconds: dict[int, tuple[int, int, float]] = {}  # number of the step -> width, depth, seconds

    def plan(self, tokens: Sequence[int], limit: int, step: StepShape) -> int:
        """Plan a step as Drafting.plan()."""
        number, self._depth = self._n_steps - _WARM_UP, step.depth
        is_wide = number in range(1, _CYCLE * self._n_cycles, _CYCLE)
        width = self._widths[number // _CYCLE % len(self._widths)] if is_wide else 1
        self._width = width if step.rows == 1 and limit >= width - 1 else 0
        self._draft = [tokens[-1]] * (self._width - 1)  # almost never right
        return len(self._draft)

    def take(self, count_allowed: Callable[[list[int]], int]) -> list[int]:
        """Return the draft, nothing if the grammar does not allow all of it."""
        if self._draft and count_allowed(self._draft) < len(self._draft):
            self._draft, self._width = [], 0
        return self._draft

    def shorten(self, length: int) -> list[int]:
        """Return the first tokens of the draft as Drafting.shorten(); a shorter step is not measured."""
        if length < len(self._draft):
            self._draft, self._width = self._draft[:length], 0
        return self._draft

    def record(self, seconds: float) -> None:
        """Account for a decode call."""
        if self._width:
            self._seconds[self._n_steps - _WARM_UP] = self._width, self._depth, seconds
            self._n_steps += 1
            self._width = 0

    def times(self) -> tuple[StepTime, ...]:
        """Return the step times; none if the answer was too short, or the machine busy."""
        steps = [self._seconds.get(_CYCLE * cycle + step) for cycle in range(self._n_cycles) for step in range(3)]
        plain: list[float] = []
        wide: dict[int, list[float]] = {width: [] for width in self._widths}
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

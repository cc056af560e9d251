"""The measurement of decode steps within an answer, for machines on which nothing was measured yet.

Some steps of the answer verify a draft of a fixed width. It is verified as ever, so the answer is the same, but when a
width is tried depends on the clock: answers that have to be repeated exactly are not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from llmrun._native import StepShape
from llmrun.engine.core.steps import raise_if_disturbed
from llmrun.engine.llama.base import Aborted
from llmrun.protocol.messages import DraftSource
from llmrun.protocol.speculation import StepTime, StepTimes

_WIDTHS = (2, 4, 8, 16)  # rows of a step
_ROUNDS = 2  # of all widths
_WARM_UP = 4  # steps
_BETWEEN = 3  # plain steps before the next wide one
_MOST_STEPS, _MOST_SHARE = 1.0, 0.01  # that wide steps may cost, as in gate.cpp: plain steps, and of the answer's time


class StepProbe:
    """Drafts for the steps to measure; the interface of drafts.Drafting.

    A wider step is tried when the answer is long enough for its cost: each row more is expected to cost what it does in
    the widest step so far, and at most as much as a plain step. So a short answer may have times of some widths only.
    """

    model = None
    is_native = False
    source: DraftSource = "probe"
    probabilities: Sequence[float] = ()

    def __init__(self, most: int = max(_WIDTHS) - 1, known: Sequence[StepTime] = ()) -> None:
        """Start.

        Args:
            most: drafted tokens of a step.
            known: times from earlier answers, whose widths are not measured again.
        """
        times = StepTimes(known)
        plain = next((each.seconds for each in known if each.width == 1), 0.0)
        self._known = {width: times.seconds(width, known[0].depth) / plain for width in times.widths} if plain else {}
        missing = [width for width in _WIDTHS if width <= most + 1 and width not in self._known]
        self._queue = missing * _ROUNDS
        self._plain: list[float] = []  # seconds
        self._wide: dict[int, list[float]] = {}  # width -> seconds
        self._lost = 0.0  # seconds
        self._n_steps = self._n_between = 0
        self._width = self._depth = 0  # of the planned step; width 0 without one
        self._draft: list[int] = []
        self._last: tuple[int, float] | None = None  # width and seconds of a wide step directly before

    def plan(self, tokens: Sequence[int], limit: int, step: StepShape) -> int:
        """Plan a step as Drafting.plan()."""
        is_wide = self._queue and limit >= self._queue[0] - 1 and self._can_afford(self._queue[0])
        self._width = (self._queue[0] if is_wide else 1) if step.rows == 1 else 0
        self._depth = max(self._depth, step.depth)
        self._draft = [tokens[-1]] * (self._width - 1)  # almost never right
        return len(self._draft)

    def _can_afford(self, width: int) -> bool:
        if self._n_between < _BETWEEN:
            return False
        plain = median(self._plain)
        times = {each: ratio * plain for each, ratio in self._known.items()}
        times |= {each: median(seconds) for each, seconds in self._wide.items()}
        widest = max((each for each in times if 1 < each <= width), default=0)
        a_row = (times[widest] - plain) / (widest - 1) if widest else plain
        return self._lost + (width - 1) * a_row <= (_MOST_STEPS + _MOST_SHARE * self._n_steps) * plain

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
        width, self._width = self._width, 0
        if not width:
            self._last = None
            return
        self._n_steps += 1
        if width > 1:
            self._last, self._n_between = (width, seconds), 0
        elif self._last is not None:
            self._add(*self._last, seconds)
            self._last = None
        elif self._n_steps > _WARM_UP:
            self._plain.append(seconds)
            self._n_between += 1

    def _add(self, width: int, seconds: float, after: float) -> None:
        """Add a wide step: llama.cpp rebuilds its graph twice, the second time in the step after it."""
        self._queue.remove(width)
        plain = self._plain[-1]
        self._wide.setdefault(width, []).append(seconds + max(0.0, after - plain))
        self._lost += max(0.0, self._wide[width][-1] - plain)

    def times(self) -> tuple[StepTime, ...]:
        """Return the step times, known ones included; none if the answer was too short, or the machine busy."""
        if not self._wide:
            return ()
        try:
            raise_if_disturbed(self._plain)
        except Aborted:
            return ()
        plain = median(self._plain)
        found = {width: ratio * plain for width, ratio in self._known.items()}
        found |= {1: plain, **{width: median(seconds) for width, seconds in self._wide.items()}}
        return tuple(StepTime(width, self._depth, found[width]) for width in sorted(found))

    def rewind(self, length: int) -> None: ...

    def close(self) -> None: ...

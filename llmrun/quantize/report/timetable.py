"""How far a long job of known steps is, and how long it will still take. Pure; the clock is the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReportStep:
    """One thing to do.

    Attributes:
        kind: "quantizing", "judging" or "timing"; steps of a kind teach how long the others of it take.
        type: of the weights it is done with.
        effort: guessed seconds; only ratios count.
    """

    kind: str
    type: str
    effort: float


class Timetable:
    """Learns from finished steps.

    Args:
        steps: all there are, in order.
    """

    def __init__(self, steps: Sequence[ReportStep]) -> None:
        self._left = list(steps)
        self._taken: dict[str, tuple[float, float]] = {}  # kind -> effort and seconds of what is done
        self._seconds = 0.0
        self._share = 0.0

    def finish(self, seconds: float) -> None:
        """The first step that was left is done, in so many seconds."""
        step = self._left.pop(0)
        effort, taken = self._taken.get(step.kind, (0.0, 0.0))
        self._taken[step.kind] = effort + step.effort, taken + seconds
        self._seconds += seconds

    def drop(self, kind: str) -> None:
        """What is left to do with a type will not be done."""
        self._left = [step for step in self._left if step.type != kind]

    def seconds_left(self, share: float = 0.0, running: float = 0.0) -> float | None:
        """None while nobody can tell.

        Args:
            share: of the first step left that is done, 0 to 1.
            running: seconds since it began.
        """
        if not self._taken and share <= 0.0:
            return None
        expected = [self._expected(step) for step in self._left]
        if share > 0.0 and running > 0.0 and expected:
            # The nearer its end, the better its own pace tells.
            by_pace = running / share
            expected[0] = share * by_pace + (1 - share) * expected[0] if self._taken else by_pace
            expected[0] = max(expected[0] - running, 0.0)
        return sum(expected)

    def share_done(self, share: float = 0.0, running: float = 0.0) -> float:
        """Of everything, 0 to 1; never less than before.

        Args: as in seconds_left().
        """
        left = self.seconds_left(share, running)
        if left is not None:
            done = self._seconds + running
            self._share = max(self._share, done / max(done + left, 1e-9))
        return self._share

    def _expected(self, step: ReportStep) -> float:
        """By the steps of its kind; before there is one, by all."""
        effort, seconds = self._taken.get(step.kind, (0.0, 0.0))
        if effort <= 0.0:
            effort = sum(effort for effort, _ in self._taken.values())
            seconds = sum(seconds for _, seconds in self._taken.values())
        return step.effort * seconds / effort if effort > 0.0 else step.effort

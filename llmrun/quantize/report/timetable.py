"""Progress and remaining time of a long job of known steps. Pure; the caller passes the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReportStep:
    """Step of the job."""

    kind: str  # "quantizing", "judging" or "timing"; finished steps improve the estimates for others of their kind
    type: str  # of the weights
    effort: float  # estimated seconds; only ratios count


class Timetable:
    """Estimates from the durations of finished steps."""

    def __init__(self, steps: Sequence[ReportStep]) -> None:
        self._left = list(steps)
        self._taken: dict[str, tuple[float, float]] = {}  # kind -> effort and seconds of the finished steps
        self._seconds = 0.0
        self._share = 0.0

    def finish(self, seconds: float) -> None:
        """Record that the first remaining step is finished, and its duration."""
        step = self._left.pop(0)
        effort, taken = self._taken.get(step.kind, (0.0, 0.0))
        self._taken[step.kind] = effort + step.effort, taken + seconds
        self._seconds += seconds

    def drop(self, kind: str) -> None:
        self._left = [step for step in self._left if step.type != kind]

    def seconds_left(self, share: float = 0.0, running: float = 0.0) -> float | None:
        """Return the estimated remaining seconds; None if unknown.

        Args:
            share: finished share of the first remaining step, 0 to 1.
            running: seconds since that step began.
        """
        if not self._taken and share <= 0.0:
            return None
        expected = [self._expected(step) for step in self._left]
        if share > 0.0 and running > 0.0 and expected:
            # The closer to its end, the more its own pace counts.
            by_pace = running / share
            expected[0] = share * by_pace + (1 - share) * expected[0] if self._taken else by_pace
            expected[0] = max(expected[0] - running, 0.0)
        return sum(expected)

    def share_done(self, share: float = 0.0, running: float = 0.0) -> float:
        """Return the finished share of the whole job, 0 to 1, which never decreases. Arguments as in seconds_left()."""
        left = self.seconds_left(share, running)
        if left is not None:
            done = self._seconds + running
            self._share = max(self._share, done / max(done + left, 1e-9))
        return self._share

    def _expected(self, step: ReportStep) -> float:
        """Estimate a step by the finished steps of its kind, or by all of them if there are none."""
        effort, seconds = self._taken.get(step.kind, (0.0, 0.0))
        if effort <= 0.0:
            effort = sum(effort for effort, _ in self._taken.values())
            seconds = sum(seconds for _, seconds in self._taken.values())
        return step.effort * seconds / effort if effort > 0.0 else step.effort

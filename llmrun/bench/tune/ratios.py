"""Is one setting faster than another? Answered from pairs of measurements that were made right after each other.

Pure arithmetic over logarithms of ratios; must not know what is measured. Few pairs must do, so the scatter is
estimated from all pairs of a search together, beginning with a guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from llmrun.student import student

_MATTERS = 1.01
_GUESSED_SCATTER = 0.02
_MOST_DEVIATION = 3.0  # sigma
_GUESS_WEIGHT = 3  # as many degrees of freedom as the guess counts for


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed of one thing divided by that of another, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def is_faster(self) -> bool:
        """Significantly."""
        return self.low > 1.0

    @property
    def is_probably_faster(self) -> bool:
        """By more than its standard error, and by enough to matter: worth a second look."""
        error = math.log(self.mean / self.low) / 2
        return self.mean > _MATTERS and math.log(self.mean) > error

    @property
    def is_slower(self) -> bool:
        """Significantly."""
        return self.high < 1.0


@dataclass(slots=True)
class Scatter:
    """How far ratios that should be the same lie apart: pooled over everything that was measured with one test.

    Attributes:
        squares: sum of squared deviations of logarithms.
        degrees: of freedom.
    """

    squares: float = _GUESS_WEIGHT * _GUESSED_SCATTER**2
    degrees: int = _GUESS_WEIGHT
    _seen: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)

    def note(self, key: tuple[int, int], logs: Sequence[float]) -> None:
        """What one pair of settings has given so far; replaces what was noted under this key.

        A burst of other load must not make everything else look uncertain: deviations are cut at 3 sigma.
        """
        squares, degrees = self._seen.get(key, (0.0, 0))
        middle, most = center(logs), _MOST_DEVIATION * math.sqrt(self.squares / self.degrees)
        new = sum(min(abs(log - middle), most) ** 2 for log in logs), len(logs) - 1
        self.squares += new[0] - squares
        self.degrees += new[1] - degrees
        self._seen[key] = new

    def ratio(self, logs: Sequence[float]) -> Ratio:
        """Middle and interval of what these pairs say. logs must not be empty."""
        middle = center(logs)
        half = student(self.degrees) * math.sqrt(self.squares / self.degrees / len(logs))
        return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def center(values: Sequence[float]) -> float:
    """Hodges and Lehmann's: the median of all means of two, so that a few odd values hardly count."""
    return median((x + y) / 2 for i, x in enumerate(values) for y in values[i:])

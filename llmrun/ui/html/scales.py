"""From numbers to places on paper: scales with round ticks. Pure; must not know SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_MOST_TICKS = 8
_TINIEST, _HUGEST = 1e-30, 1e30  # nothing that is measured is beyond, and computing with what is goes wrong
_ENDS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)  # of a logarithmic scale, times a power of ten
_ZERO_SHARE = 0.1  # of a logarithmic scale, for zero, which has no place on it


@dataclass(frozen=True, slots=True)
class Scale:
    """Places of numbers between two ends.

    Attributes:
        base: 0 is linear, else of the logarithm.
        low, high: numbers at the ends.
        start, end: their places; start is where zero is when a logarithmic scale has to show it.
        low_place: of `low`; start, but where zero takes some room.
        ticks: round numbers in between, both ends included where they are round.
    """

    base: float
    low: float
    high: float
    start: float
    end: float
    low_place: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        """The place of a number; zero and less are at the start of a logarithmic scale, numbers outside at its ends."""
        if self.base and value <= 0:
            return self.start
        share = (self._of(value) - self._of(self.low)) / ((self._of(self.high) - self._of(self.low)) or 1.0)
        return self.low_place + min(max(share, 0.0), 1.0) * (self.end - self.low_place)

    def _of(self, value: float) -> float:
        return math.log(value, self.base) if self.base else value


def is_drawable(*values: float | None) -> bool:
    """Whether all of them are numbers of a size that can be drawn."""
    return all(value is not None and (value == 0 or _TINIEST < abs(value) < _HUGEST) for value in values)


def scale(values: Iterable[float], start: float, end: float) -> Scale:
    """A logarithmic scale that has a place for all these numbers; zeros are at its start, apart from the rest.

    Args:
        values: what is to be drawn; those that are not numbers don't count.
        start, end: places of its ends, e.g. pixels.
    """
    drawn = [value for value in values if is_drawable(value)]
    positive = [value for value in drawn if value > 0]
    low, high = min(positive, default=1.0), max(positive, default=10.0)
    has_zero = len(positive) < len(drawn)
    if high > low:
        low, high = _round_end(low, above=False), _round_end(high, above=True)
    else:  # one number, or several equal ones: at the end when zero is at the start
        power = math.floor(math.log10(low) + 1e-9) - (has_zero and math.log10(low).is_integer())
        low, high = 10.0**power, 10.0 ** (power + 1)
    low_place = start + (end - start) * _ZERO_SHARE if has_zero else start
    return Scale(10.0, low, high, start, end, low_place, _ticks(low, high))


def _round_end(value: float, *, above: bool) -> float:
    """The next round number above or below a positive one, or itself."""
    power = 10.0 ** math.floor(math.log10(value))
    if above:
        return min(end * power for end in _ENDS if end * power >= value * (1 - 1e-9))
    return max(end * power for end in _ENDS if end * power <= value * (1 + 1e-9))


def _ticks(low: float, high: float) -> tuple[float, ...]:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / _MOST_TICKS))
    factors: tuple[float, ...] = (1,)
    if high / low <= 10:
        factors = (1, 1.5, 2, 3, 5, 7)
    elif last - first <= 3:
        factors = (1, 2, 5)
    ticks = (10.0**power * factor for power in range(first, last + 1, every) for factor in factors)
    return tuple(tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9))


def number(value: float) -> str:
    """A number for an axis or a tooltip: three or four digits that count, thousands separated, e.g. "0.05", "1,024"."""
    if not math.isfinite(value):
        return "?"
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-4:
        return f"{value:.3g}"
    if size >= 100:
        return f"{value:,.0f}"
    decimals = 0 if size == 0 else max(0, 2 - math.floor(math.log10(size)))
    written = f"{value:.{decimals}f}"
    return written.rstrip("0").rstrip(".") if "." in written else written

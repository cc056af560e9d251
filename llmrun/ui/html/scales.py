"""From numbers to places on paper: linear and logarithmic scales with round ticks. Pure; must not know SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["linear", "log2", "log10"]

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


def scale(
    values: Iterable[float], kind: Kind, start: float, end: float, *, from_zero: bool = False, whole: bool = False
) -> Scale:
    """A scale that has a place for all these numbers.

    Args:
        values: what is to be drawn; those that are not numbers don't count.
        kind: a logarithmic scale puts zeros at its start, apart from the rest.
        start, end: places of its ends, e.g. pixels.
        from_zero: a linear scale begins at zero.
        whole: a linear scale has no ticks between whole numbers.
    """
    drawn = [value for value in values if is_drawable(value)]
    if kind == "linear":
        return _linear([*drawn, 0.0] if from_zero else drawn, start, end, 1.0 if whole else 0.0)
    return _logarithmic(drawn, 2.0 if kind == "log2" else 10.0, start, end)


def _linear(values: list[float], start: float, end: float, least_step: float) -> Scale:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high == low:
        low, high = (low, low + 1.0) if low == 0 else (min(low * 0.9, low * 1.1), max(low * 0.9, low * 1.1))
    step = max(round_step(high - low, 6), least_step)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    count = round((high - low) / step)
    ticks = tuple(low + index * step for index in range(count + 1))
    return Scale(0.0, low, high, start, end, start, tuple(0.0 if abs(tick) < step / 2 else tick for tick in ticks))


def round_step(span: float, most: int) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that divides a span into at most so many parts."""
    rough = max(span / most, 1e-300)
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= rough * (1 - 1e-9)), 10 * power)


def _logarithmic(values: list[float], base: float, start: float, end: float) -> Scale:
    positive = [value for value in values if value > 0]
    low, high = min(positive, default=1.0), max(positive, default=base)
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    has_zero = len(positive) < len(values)
    if first == last:  # one number, or several equal ones: at the end when zero is at the start
        first, last = (first - 1, last) if has_zero else (first, last + 1)
    if base == 10.0 and high > low:
        low, high = _round_end(low, above=False), _round_end(high, above=True)
    else:
        low, high = base**first, base**last
    low_place = start + (end - start) * _ZERO_SHARE if has_zero else start
    return Scale(base, low, high, start, end, low_place, _log_ticks(base, first, last, low, high))


def _round_end(value: float, *, above: bool) -> float:
    """The next round number above or below a positive one, or itself."""
    power = 10.0 ** math.floor(math.log10(value))
    if above:
        return min(end * power for end in _ENDS if end * power >= value * (1 - 1e-9))
    return max(end * power for end in _ENDS if end * power <= value * (1 + 1e-9))


def _log_ticks(base: float, first: int, last: int, low: float, high: float) -> tuple[float, ...]:
    every = max(1, math.ceil((last - first) / _MOST_TICKS))
    factors: tuple[float, ...] = (1,)
    if base == 10.0 and high / low <= 10:
        factors = (1, 1.5, 2, 3, 5, 7)
    elif base == 10.0 and last - first <= 3:
        factors = (1, 2, 5)
    ticks = (base**power * factor for power in range(first, last + 1, every) for factor in factors)
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

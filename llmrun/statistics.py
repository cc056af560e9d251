"""Quantiles, and confidence intervals of means by Student's t distribution."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import stdev


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, interpolated between neighbours as NumPy does; `share` is from 0 to 1."""
    position = share * (len(ordered) - 1)
    index = int(position)
    below, above = float(ordered[index]), float(ordered[min(index + 1, len(ordered) - 1)])
    return below + (above - below) * (position - index)


@functools.cache
def student(freedom: float, confidence: float = 0.95) -> float:
    """Return the bound of |t| with this confidence; 12.71 for one degree of freedom and 95 %."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def half_width(samples: Sequence[float]) -> float:
    """Return half of the 95 % confidence interval of the mean of two or more independent samples."""
    return student(len(samples) - 1) * stdev(samples) / math.sqrt(len(samples))


def positive_interval(mean: float, half: float) -> tuple[float, float]:
    """Return the interval of a non-negative mean, such as a rate or a divergence: mean * exp(± half / mean).

    It is symmetric on a logarithmic scale (the delta method), so both ends are positive. If half is small, it is about
    mean ± half.
    """
    if not half:
        return mean, mean
    return mean * math.exp(-half / mean), mean * math.exp(half / mean)


def _within(t: float, freedom: float) -> float:
    """Return P(|T| < t): with T = sqrt(freedom) tan(angle), the integral of cos(angle)^(freedom - 1)."""
    steps, end = 200, math.atan(t / math.sqrt(freedom))
    heights = [math.pow(math.cos(end * step / steps), freedom - 1) for step in range(steps + 1)]
    area = end / steps / 3 * (heights[0] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]) + heights[-1])  # Simpson
    return 2 * area * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2)

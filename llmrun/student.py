"""Student's t distribution: how far off the mean of a few samples can be. Both processes use it."""

from __future__ import annotations

import functools
import math


@functools.cache
def student(freedom: float, confidence: float = 0.95) -> float:
    """Student's t that |t| stays below with this confidence; 12.71 for one degree of freedom and 95 %."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: float) -> float:
    """Probability of |T| < t: with T = sqrt(freedom) tan(angle), the integral of cos(angle)^(freedom - 1)."""
    steps, end = 200, math.atan(t / math.sqrt(freedom))
    heights = [math.pow(math.cos(end * step / steps), freedom - 1) for step in range(steps + 1)]
    area = end / steps / 3 * (heights[0] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]) + heights[-1])  # Simpson
    return 2 * area * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2)

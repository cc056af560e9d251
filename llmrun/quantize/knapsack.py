"""Solver of the multiple-choice knapsack problem: one option per item, smallest total cost within a capacity. Pure.

Dynamic programming over the capacity: exact if the capacity has few enough units. Otherwise sizes are rounded up, and
the rest is filled greedily by the upgrades that save most for their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

_UNITS = 1 << 14


class Option(NamedTuple):
    """Choice for an item."""

    size: int
    cost: float


def choose_options(items: Sequence[Sequence[Option]], capacity: int) -> list[int] | None:
    """Return the index of the chosen option of each item; None if even the smallest don't fit.

    Args:
        items: the options of each item, at minimum one.
        capacity: upper bound of the total size.
    """
    import numpy as np

    minimum = [min(option.size for option in options) for options in items]
    free = capacity - sum(minimum)
    if free < 0:
        return None
    unit = _unit(items, minimum, free)
    costs = np.zeros(free // unit + 1)  # smallest cost of the items so far, by free units
    choices = []
    for options, smallest in zip(items, minimum, strict=True):
        table = np.full((len(options), len(costs)), np.inf)
        for number, option in enumerate(options):
            units = -(-(option.size - smallest) // unit)
            if units < len(costs):
                table[number, units:] = costs[: len(costs) - units] + option.cost
        choices.append(table.argmin(axis=0).astype(np.uint8))
        costs = table.min(axis=0)
    left, chosen = len(costs) - 1, []
    for options, smallest, choice in zip(reversed(items), reversed(minimum), reversed(choices), strict=True):
        chosen.append(int(choice[left]))
        left -= -(-(options[chosen[-1]].size - smallest) // unit)
    return _fill(items, chosen[::-1], capacity)


def _unit(items: Sequence[Sequence[Option]], minimum: list[int], free: int) -> int:
    """Return the size of a unit: the common divisor of all sizes, or a multiple of it for a large capacity."""
    extras = (option.size - smallest for options, smallest in zip(items, minimum, strict=True) for option in options)
    common = gcd(*extras) or 1
    return common * max(1, -(-free // (common * _UNITS)))


def _fill(items: Sequence[Sequence[Option]], chosen: list[int], capacity: int) -> list[int]:
    """Spend the rest of the capacity on the upgrades that save most for their size, until none fits."""
    free = capacity - sum(options[number].size for options, number in zip(items, chosen, strict=True))
    while True:
        best = (0.0, 0, 0)
        for item, (options, number) in enumerate(zip(items, chosen, strict=True)):
            now = options[number]
            for better, option in enumerate(options):
                growth, saved = option.size - now.size, now.cost - option.cost
                if growth <= free and saved > 0:
                    best = max(best, (saved / max(growth, 1), item, better))
        if not best[0]:
            return chosen
        _, item, better = best
        free -= items[item][better].size - items[item][chosen[item]].size
        chosen[item] = better

"""Which of its options each thing should get so that the costs are least and all fit together. Pure arithmetic.

The multiple-choice knapsack problem, by dynamic programming over the room: exact where the room has few enough units,
and otherwise with sizes rounded up, and what that leaves free filled by the upgrades that save most for their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

_UNITS = 1 << 14


class Option(NamedTuple):
    """What a thing can be: how much room that takes, and what it costs."""

    size: int
    cost: float


def choose_options(things: Sequence[Sequence[Option]], room: int) -> list[int] | None:
    """Of each thing the number of the option to take; None when even the smallest don't fit.

    Args:
        things: the options of each, at least one.
        room: that all may take together.
    """
    import numpy as np

    least = [min(option.size for option in options) for options in things]
    free = room - sum(least)
    if free < 0:
        return None
    unit = _unit(things, least, free)
    costs = np.zeros(free // unit + 1)  # by the units that are free, of the things so far
    choices = []
    for options, smallest in zip(things, least, strict=True):
        table = np.full((len(options), len(costs)), np.inf)
        for number, option in enumerate(options):
            units = -(-(option.size - smallest) // unit)
            if units < len(costs):
                table[number, units:] = costs[: len(costs) - units] + option.cost
        choices.append(table.argmin(axis=0).astype(np.uint8))
        costs = table.min(axis=0)
    left, chosen = len(costs) - 1, []
    for options, smallest, choice in zip(reversed(things), reversed(least), reversed(choices), strict=True):
        chosen.append(int(choice[left]))
        left -= -(-(options[chosen[-1]].size - smallest) // unit)
    return _filled(things, chosen[::-1], room)


def _unit(things: Sequence[Sequence[Option]], least: list[int], free: int) -> int:
    """What room is counted in: what all sizes are multiples of, or some of these when the room is large."""
    extras = (option.size - smallest for options, smallest in zip(things, least, strict=True) for option in options)
    common = gcd(*extras) or 1
    return common * max(1, -(-free // (common * _UNITS)))


def _filled(things: Sequence[Sequence[Option]], chosen: list[int], room: int) -> list[int]:
    """Take what room is left for the upgrades that save most for their size, until none fits."""
    free = room - sum(options[number].size for options, number in zip(things, chosen, strict=True))
    while True:
        best = (0.0, 0, 0)
        for thing, (options, number) in enumerate(zip(things, chosen, strict=True)):
            now = options[number]
            for better, option in enumerate(options):
                growth, saved = option.size - now.size, now.cost - option.cost
                if growth <= free and saved > 0:
                    best = max(best, (saved / max(growth, 1), thing, better))
        if not best[0]:
            return chosen
        _, thing, better = best
        free -= things[thing][better].size - things[thing][chosen[thing]].size
        chosen[thing] = better

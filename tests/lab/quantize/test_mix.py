"""The knapsack solver against exhaustive search."""

from __future__ import annotations

import itertools
import random

import pytest
from support.seeds import for_seeds

from llmrun.lab.quantize.mix import Option, choose_options


def tried(things: list[list[Option]], room: int) -> float:
    """Return the smallest cost of all combinations that fit."""
    fitting = (chosen for chosen in itertools.product(*things) if sum(option.size for option in chosen) <= room)
    return min((sum(option.cost for option in chosen) for chosen in fitting), default=float("inf"))


def random_things(seed: int) -> list[list[Option]]:
    generator = random.Random(seed)
    return [
        [Option(generator.randint(1, 40), generator.random()) for _ in range(generator.randint(1, 4))]
        for _ in range(generator.randint(1, 6))
    ]


@for_seeds(60)
def test_costs_are_the_least_there_are(seed: int) -> None:
    things = random_things(seed)
    room = random.Random(-seed).randint(1, 200)
    numbers = choose_options(things, room)
    if numbers is None:
        assert sum(min(option.size for option in options) for options in things) > room
        return
    chosen = [options[number] for options, number in zip(things, numbers, strict=True)]
    assert sum(option.size for option in chosen) <= room
    assert sum(option.cost for option in chosen) == pytest.approx(tried(things, room))


def test_a_large_room_is_filled_to_a_per_cent_and_the_choice_is_nearly_the_best() -> None:
    """Sizes without a common divisor: they are rounded up, and the rest is filled by upgrades."""
    generator = random.Random(1)
    things = []
    for _ in range(200):
        weights, sensitivity = generator.randint(10**6, 10**7), generator.random()
        sizes = [weights * bits // 8 + generator.randint(0, 31) for bits in (2, 3, 4, 5, 6, 8)]
        things.append([Option(size, sensitivity * 4.0 ** (-8 * size / weights)) for size in sizes])
    room = sum(options[3].size for options in things)
    numbers = choose_options(things, room)
    assert numbers is not None
    chosen = [options[number] for options, number in zip(things, numbers, strict=True)]
    assert 0.99 * room <= sum(option.size for option in chosen) <= room
    # No cost below this bound is possible: what a price for every byte would make of it.
    cost = sum(option.cost for option in chosen)
    prices = [10.0 ** (-exponent / 10) for exponent in range(40, 140)]
    bound = max(
        sum(min(option.cost + price * option.size for option in options) for options in things) - price * room
        for price in prices
    )
    assert bound <= cost <= 1.02 * bound


def test_what_is_larger_and_no_better_is_not_chosen() -> None:
    assert choose_options([[Option(10, 1.0), Option(20, 1.0)]], 100) == [0]


def test_nothing_to_choose() -> None:
    assert choose_options([], 0) == []

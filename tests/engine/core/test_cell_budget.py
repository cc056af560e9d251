"""Cells of the KV cache, counted, against a twin that has every cell."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from llmrun.engine.core.cell_budget import CellBudget


class Cells:
    """The slow twin: each slot's cells by name, as llama.cpp's unified KV cache has them."""

    def __init__(self) -> None:
        self.slots: dict[int, list[int]] = {slot: [] for slot in range(5)}
        self._names = itertools.count()

    def append(self, slot: int, n_tokens: int) -> None:
        self.slots[slot] += itertools.islice(self._names, n_tokens)

    def cut(self, slot: int, length: int) -> None:
        del self.slots[slot][length:]

    def share(self, source: int, target: int, length: int) -> None:
        self.slots[target] = self.slots[source][:length]

    def drop(self, slot: int, start: int, end: int) -> None:
        del self.slots[slot][start:end]

    def count(self, slots: list[int]) -> int:
        return len(set(itertools.chain.from_iterable(self.slots[slot] for slot in slots)))

    def n_shared(self) -> int:
        counts = Counter(itertools.chain.from_iterable(self.slots.values()))
        return sum(count > 1 for count in counts.values())

    def is_shared(self, slot: int, start: int) -> bool:
        others = {cell for other, cells in self.slots.items() if other != slot for cell in cells}
        return not others.isdisjoint(self.slots[slot][start:])


def test_what_is_shared_counts_once() -> None:
    budget = CellBudget(100)
    budget.append(0, 60)
    budget.share(0, 1, 40)
    assert budget.used == 60
    budget.append(1, 10)
    assert (budget.used, budget.admits(30), budget.admits(31)) == (70, True, False)
    budget.cut(0, 0)
    assert budget.used == 50, "the shared cells stay for the other one"
    budget.cut(1, 0)
    assert budget.used == 0


def test_random_histories_against_the_twin() -> None:
    rng = random.Random(6)
    for _ in range(100):
        budget, twin = CellBudget(10_000), Cells()
        for _ in range(60):
            slot, other = rng.sample(range(5), 2)
            length = len(twin.slots[slot])
            start, end = sorted(rng.randint(0, length) for _ in range(2))
            action = rng.choice(["append", "append", "append", "cut", "share", "drop"])
            if action == "append":
                arguments = (slot, rng.randint(1, 5))
            elif action == "cut":
                arguments = (slot, rng.randint(0, length + 2))
            elif action == "share":
                arguments = (slot, other, start)
            elif budget.is_shared(slot, start):
                continue
            else:
                arguments = (slot, start, end)
            getattr(budget, action)(*arguments)
            getattr(twin, action)(*arguments)
            assert budget.used == twin.count(list(range(5)))
            assert budget.shared == twin.n_shared()
            for count in range(6):
                some = rng.sample(range(5), count)
                assert budget.count(some) == twin.count(some)
            for each in range(5):
                assert budget.length(each) == len(twin.slots[each])
                first = rng.randint(0, budget.length(each))
                assert budget.is_shared(each, first) == twin.is_shared(each, first)

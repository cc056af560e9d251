"""How much work something is, told in plain loops done beside it: seconds mean nothing on a busy machine.

What is counted is this process's own CPU time, so that neighbours don't count; the loop, measured in the same moment,
takes out how fast the machine is, and how fast it lets this process be.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

ROUNDS = 100_000
_LASTING_SECONDS = 2.0  # so long a measured loop stands for this moment


def loop_seconds() -> float:
    """CPU time of one loop, about 5 ms; measured at most every two seconds."""
    return _seconds_in(int(time.monotonic() / _LASTING_SECONDS))


@lru_cache(maxsize=1)
def _seconds_in(period: int) -> float:
    return min(_measured(_loop) for _ in range(3))


def loops(action: Callable[[], object], *, times: int = 1) -> float:
    """CPU time of an action in loops: the least of several times."""
    return min(_measured(action) for _ in range(times)) / loop_seconds()


def _measured(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def _loop() -> int:
    total = 0
    for number in range(ROUNDS):
        total += number * number % 7
    return total

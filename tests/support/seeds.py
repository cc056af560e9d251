"""Tests of many seeds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest


def for_seeds(count: int, each: int = 20) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with each seed from 0 on, `each` of them in one test: most take less time than pytest takes for one.

    The test has an argument `seed`; its fixtures are shared by the seeds of one test.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(seeds: range, *args: Any, **named: Any) -> None:
            for seed in seeds:
                try:
                    test(*args, seed=seed, **named)
                except BaseException:
                    print(f"seed {seed}")
                    raise

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name != "seed"]
        seeds = inspect.Parameter("seeds", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = signature.replace(parameters=[seeds, *others])  # type: ignore[attr-defined]
        parts = [range(start, min(start + each, count)) for start in range(0, count, each)]
        return pytest.mark.parametrize("seeds", parts, ids=lambda part: f"{part.start}-{part.stop - 1}")(run)

    return decorate

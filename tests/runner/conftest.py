"""Runners of the fake engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmrun.runner.launch import launch
from llmrun.runner.runner import Runner

FAKE_ENGINE = Path(__file__).parents[1] / "support/fake_engine.py"


@pytest.fixture
def start() -> Iterator[Callable[[str], Runner]]:
    """start(mode): a runner of a fake engine, closed in the end."""
    runners: list[Runner] = []

    def make(mode: str = "normal") -> Runner:
        runners.append(Runner(launch((sys.executable, str(FAKE_ENGINE), mode))))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()

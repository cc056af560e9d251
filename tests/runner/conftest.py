"""Runners of the fake engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch

FAKE_ENGINE = Path(__file__).parents[1] / "support/fake_engine.py"


@pytest.fixture
def start() -> Iterator[Callable[[str], EngineClient]]:
    """start(mode): a runner of a fake engine, closed in the end."""
    runners: list[EngineClient] = []

    def make(mode: str = "normal") -> EngineClient:
        runners.append(EngineClient(launch((sys.executable, str(FAKE_ENGINE), mode))))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()

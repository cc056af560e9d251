"""What several test modules need: processes started by a test find the package that the test imported."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import llmrun
from llmrun import errors

PACKAGE_PARENT = Path(llmrun.__file__).parents[1]


@pytest.fixture(autouse=True)
def arguments_are_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name arguments as the command line does, whatever an earlier test took from the package."""
    monkeypatch.setattr(errors, "rephrase", str)


@pytest.fixture
def package_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subprocesses import llmrun from where this process has it, whatever their folder."""
    paths = [str(PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], float], bool]:
    """eventually(condition, seconds): whether the condition came true in that time."""

    def wait(condition: Callable[[], bool], seconds: float) -> bool:
        ends = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > ends:
                return False
            time.sleep(0.01)
        return True

    return wait

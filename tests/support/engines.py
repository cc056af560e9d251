"""Processes of fake_engine.py, in the place of engines."""

from __future__ import annotations

import sys
from pathlib import Path

from llmrun.runner.client import EngineClient
from llmrun.runner.launch import EngineHandle, launch

_FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


def fake_engine(mode: str = "normal") -> EngineHandle:
    """A process in a mode of fake_engine.py."""
    return launch((sys.executable, str(_FAKE_ENGINE), mode))


def fake_client(mode: str = "normal") -> EngineClient:
    """The client of such a process."""
    return EngineClient(fake_engine(mode))

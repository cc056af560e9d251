"""Questions to an engine without a model: whatever comes back, or nothing, is an answer or an error of ours."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from llmrun.engine.jobs.machine.build import parse_system_info
from llmrun.errors import EngineCrashedError, LlmrunError
from llmrun.planning import inquiry
from llmrun.planning.inquiry import ask


def say(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Another program in the engine's place."""
    run = subprocess.run

    def replaced(command: list[str], **options: Any) -> Any:
        return run([sys.executable, "-c", code], **options)

    monkeypatch.setattr(inquiry.subprocess, "run", replaced)


def test_what_llama_cpp_was_built_with() -> None:
    answer = ask("build")
    assert set(answer) == {"features", "gpus", "offload"}
    assert answer["features"]["CPU"]


@pytest.mark.parametrize("output", ["", "nonsense", "[1]", "null", "{"])
def test_garbage(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    say(monkeypatch, f"print({output!r})")
    with pytest.raises(LlmrunError, match="garbage"):
        ask("build")


def test_failure_tells_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "raise SystemExit('no library')")
    with pytest.raises(LlmrunError, match="no library"):
        ask("build")


def test_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(EngineCrashedError, match="signal 9"):
        ask("build")


def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "import time; time.sleep(60)")
    with pytest.raises(LlmrunError, match="within 0 seconds"):
        ask("build", seconds=0.2)


def test_system_info() -> None:
    text = "CUDA : ARCHS = 500,610 | USE_GRAPHS = 1 | CPU : SSE3 = 1 | AVX512 = 0 | REPACK = 1 | "
    assert parse_system_info(text) == {"CUDA": ["ARCHS", "USE_GRAPHS"], "CPU": ["SSE3", "REPACK"]}
    assert parse_system_info("") == {}

"""The clients' own programs and libraries against `llmrun serve`, with a model of random weights that plays a script.

    PATH=.../node_modules/.bin:$PATH pytest -m '' -n 0 tests/clients

What is not installed is skipped, and named in the table at the end. Nothing leaves the machine: inside
`unshare -rn sh -c 'ip link set lo up; exec pytest ...'` nothing could.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.real_server import RealServer, environment

sys.path.insert(0, str(Path(__file__).parent))

from table import ROWS, Row
from wide_model import write_wide_model

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table."""
    if ROWS:
        table = [Row("CLIENT", "VERSION", "WHAT WAS DONE", "RESULT"), *ROWS]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            terminalreporter.write_line("  ".join(map(str.ljust, row, widths)).rstrip())


@pytest.fixture(scope="session")
def command() -> str:
    """The installed command."""
    found = shutil.which("llmrun", path=str(Path(sys.executable).parent)) or shutil.which("llmrun")
    return found or pytest.skip("the llmrun command is not installed")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def server(command: str, home: Path) -> Iterator[RealServer]:
    """`llmrun serve` with the wide model."""
    shown = subprocess.run([command, "show", "smollm2", "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if shown.returncode:
        pytest.skip("smollm2, whose vocabulary is used, is not here: llmrun pull smollm2")
    model = write_wide_model(Path(json.loads(shown.stdout)["path"]), home / "wide.gguf")
    running = RealServer(command, home, "--grace", "0s", "--alias", f"wide={model}", model=str(model))
    yield running
    running.end()


@pytest.fixture
def clean_environment(home: Path, tmp_path: Path) -> dict[str, str]:
    """An environment in which a client finds no configuration and no account."""
    taken = ("ANTHROPIC", "OPENAI", "CLAUDE", "CODEX", "OLLAMA", "XDG", "LLMRUN")
    kept = {name: value for name, value in environment(home).items() if not name.startswith(taken)}
    return {**kept, "HOME": str(tmp_path), "LLMRUN_HOME": str(home), "HF_HOME": hub_home()}


def hub_home() -> str:
    """Return the Hugging Face cache, which is below the real home."""
    return os.environ.get("HF_HOME") or str(Path("~/.cache/huggingface").expanduser())

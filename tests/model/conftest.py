"""The real thing: the installed `llmrun` command with the real SmolLM2, which `llmrun pull` fetches once.

Every test in this folder has the marker `model`. Without the model they are skipped; where CI=true a skip is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.installed import Installed
from support.real_server import RealServer

FOLDER = Path(__file__).parent
PULL_SECONDS = 600


def in_ci() -> bool:
    """Whether this run has to be complete."""
    return os.environ.get("CI", "").lower() in {"1", "true"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.model)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """In CI, a skipped test here is a failed one."""
    report = yield
    if report.skipped and in_ci():
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def command() -> str:
    """Path of the installed command: beside this Python, else on PATH."""
    found = shutil.which("llmrun", path=str(Path(sys.executable).parent)) or shutil.which("llmrun")
    if found is None:
        pytest.skip("the llmrun command is not installed: pip install '.[test]'")
    return found


@pytest.fixture(scope="session")
def pulled(command: str) -> None:
    """The model is in the Hugging Face cache, the person's own unless HF_HOME says otherwise."""
    try:
        done = subprocess.run(
            [command, "pull", "smollm2"], capture_output=True, text=True, timeout=PULL_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"`llmrun pull smollm2` takes longer than {PULL_SECONDS} seconds")
    if done.returncode != 0:
        pytest.skip(f"`llmrun pull smollm2` failed: {done.stderr.strip()}")


@pytest.fixture(scope="session")
def model_path(command: str, pulled: None) -> Path:
    """The model's file, as `llmrun show` names it."""
    import json

    shown = subprocess.run([command, "show", "smollm2", "--json"], capture_output=True, check=True, timeout=60)
    return Path(json.loads(shown.stdout)["path"])


@pytest.fixture(scope="module")
def server(command: str, pulled: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """`llmrun serve`, one for all tests of a file; it ends well."""
    running = RealServer(command, tmp_path_factory.mktemp("home"), "--grace", "0s")
    yield running
    assert running.end() == 0
    assert "Traceback" not in running.log.read_text()


@pytest.fixture
def llmrun(command: str, pulled: None, tmp_path: Path) -> Iterator[Installed]:
    """Drives the installed command, with the model there; what it started is ended afterwards."""
    installed = Installed(command, home=tmp_path / "llmrun-home")
    yield installed
    installed.close()

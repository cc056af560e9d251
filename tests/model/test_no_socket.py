"""A model on this disk runs without the network: neither front nor engine opens a socket or looks up a name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.installed import Installed

# Python imports sitecustomize in every process, before anything else; the engine inherits PYTHONPATH.
WATCH = """
import os, sys

def note(event, arguments):
    if event.startswith("socket."):
        with open(os.environ["LLMRUN_TEST_SOCKETS"], "a") as file:
            file.write(f"{os.getpid()} {event}\\n")

sys.addaudithook(note)
with open(os.environ["LLMRUN_TEST_SOCKETS"], "a") as file:
    file.write(f"{os.getpid()} started\\n")
"""


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    """An environment in which every Python process notes what it does with sockets."""
    folder = tmp_path / "watch"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WATCH)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "LLMRUN_TEST_SOCKETS": str(folder / "noted"),
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
    }


def noted(watched: dict[str, str]) -> list[str]:
    return Path(watched["LLMRUN_TEST_SOCKETS"]).read_text().splitlines()


def test_the_watch_sees_sockets(watched: dict[str, str]) -> None:
    code = "import socket; socket.socket().close()"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **watched}, check=True)
    assert any(line.endswith("socket.__new__") for line in noted(watched))


@pytest.mark.parametrize("name", ["alias", "path"])
def test_run_opens_no_socket(llmrun: Installed, model_path: Path, watched: dict[str, str], name: str) -> None:
    model = "smollm2" if name == "alias" else str(model_path)
    done = llmrun.run("run", model, "--max-tokens", "3", "Hello", env=watched)
    assert done.returncode == 0, done.stderr
    lines = noted(watched)
    assert len({line.split()[0] for line in lines}) >= 2, "the engine was not watched"
    assert [line for line in lines if not line.endswith(" started")] == []


def test_pull_of_what_is_there_opens_no_socket_offline(llmrun: Installed, watched: dict[str, str]) -> None:
    """Elsewhere it asks the hub for a newer file."""
    assert llmrun.run("pull", "smollm2", env=watched | {"HF_HUB_OFFLINE": "1"}).returncode == 0
    assert [line for line in noted(watched) if not line.endswith(" started")] == []

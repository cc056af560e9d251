"""The commands of README.md, run by a shell as they are typed, over the fake engine and tiny models of their names.

tests/model/test_readme.py runs those that need a model's numbers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli.test_readme import readme_commands
from support.gguf_writer import runnable_model, write
from support.installed import SECONDS

from llmrun.models.registry import load_catalogue

FRONT = Path(__file__).parents[1] / "support/front.py"
COMMIT = "0" * 40
FILES = {
    "README.md": "The sky is blue.",
    "in.csv": "text\nhi\n",
    "notes.txt": "tea\nsea\n",
    "tools.py": 'def now() -> str:\n    """Return the time."""\n    return "noon"\n',
    "key": "k",
    "answer.txt": "Hello",
}
ELSEWHERE = re.compile(
    "pip install|uv run|--web|llmrun (serve|worker|launch|tune|bench|explain|embed|rerank|report|evaluate|tokenize|"
    "score|watermark|replay|doctor|stop|logs|quantize)"
)
"""Commands that run on, install, or need what the fake engine lacks."""
STATUSES = {
    "llmrun run smolvlm-500m": 2,  # the image is empty
    "llmrun search": 5,  # offline
    "llmrun rm": 2,  # asks first
    "llmrun verify": 5,  # the tiny models are not the hub's
    "llmrun convert": 3,  # no folder
    'llmrun run smollm2 "hi" --lora': 3,  # no adapter
    "llmrun chat --at": 5,  # no server
    "llmrun run big.gguf": 5,  # no worker
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a shell in a folder with all files and models that the README names."""
    folder = tmp_path_factory.mktemp("readme")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "cat.png").write_bytes(b"")
    model = write(folder / "f16.gguf", runnable_model())
    for name in ("my.gguf", "big.gguf"):
        shutil.copy(model, folder / name)
    for alias in ("smollm2", "qwen3-4b", "qwen3-0.6b", "smolvlm-500m"):
        entry = load_catalogue().entries[alias]
        repository = folder / "hub" / f"models--{entry.repository.replace('/', '--')}"
        for name in ("refs", "blobs", f"snapshots/{COMMIT}"):
            (repository / name).mkdir(parents=True)
        (repository / "refs/main").write_text(COMMIT)
        shutil.copy(model, repository / "blobs" / ("1" * 64))
        (repository / "snapshots" / COMMIT / entry.filename(entry.quant)).symlink_to(repository / "blobs" / ("1" * 64))
    command = folder / "bin/llmrun"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {FRONT} normal "$@"\n')
    command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(FRONT.parents[2]),
        "HOME": str(folder),
        "LLMRUN_HOME": str(folder / "home"),
        "LLMRUN_CONFIG": str(folder / "config.toml"),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PWD": str(folder),
    }


@pytest.mark.parametrize("line", [line for line in dict.fromkeys(readme_commands()) if not ELSEWHERE.search(line)])
def test_a_command_runs_as_typed(line: str, place: dict[str, str]) -> None:
    done = subprocess.run(
        ["sh", "-c", line], input="Hi\n", capture_output=True, text=True, timeout=SECONDS, cwd=place["PWD"], env=place
    )
    expected = next((status for start, status in STATUSES.items() if line.startswith(start)), 0)
    allowed = (0, 2) if "--continue" in line else (expected,)  # without an earlier chat
    assert done.returncode in allowed, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() or done.stderr.strip()

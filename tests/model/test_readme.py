"""The README's five things to try, run by a shell as they are typed, with the real model."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from support.installed import SECONDS, Installed

README = Path(__file__).parents[2] / "README.md"


def to_try() -> list[str]:
    """The command lines of the first block of "Try"."""
    section = README.read_text(encoding="utf-8").split("\n## Try\n")[1]
    block = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[0]
    return [line for line in block.replace("\\\n", "").splitlines() if line]


def with_model() -> list[str]:
    """The commands of the table that need this model's numbers, and end."""
    rows = re.findall(r"^\|.*", README.read_text(encoding="utf-8").split("\n## I want to ...\n")[1], re.MULTILINE)
    spans = re.findall(r"`(llmrun [^`]*)`", "\n".join(rows))
    words = ("explain", "tokenize", "score", "watermark", "run smollm2", "batch", "replay")
    lines = [span.replace("\\|", "|") for span in spans if span.startswith(tuple(f"llmrun {word}" for word in words))]
    return [line for line in lines if "--lora" not in line]


def test_five_commands_are_shown() -> None:
    assert len(to_try()) == 5


@pytest.mark.parametrize(
    "line",
    # tests/cli/test_readme.py runs the table's commands with a fake engine.
    [*to_try(), *[pytest.param(line, marks=pytest.mark.slow) for line in with_model()]],
    ids=lambda line: " ".join(line.split()[1:5]),
)
def test_a_command_runs_as_typed(line: str, llmrun: Installed, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("The sky is blue because air scatters blue light more than red light.")
    (tmp_path / "in.csv").write_text("text\nThe sea is wide.\n")
    (tmp_path / "notes.txt").write_text("Tea is a drink.\n")
    (tmp_path / "answer.txt").write_text(
        "The sky is blue, since air scatters blue light more than red light does. " * 20
    )
    (tmp_path / "key").write_text("secret")
    settings = tmp_path / "config.toml"
    settings.write_text("[models.smollm2]\nmax-tokens = 64\n")  # a sampled answer may fill the whole window
    if "replay" in line:
        line = f'llmrun run smollm2 "hi" --record hi.json && {line}'
    path = os.pathsep.join([str(Path(llmrun.command).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-c", line],
        input="Hi\n",
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=tmp_path,
        env=llmrun.environment({"PATH": path, "LLMRUN_CONFIG": str(settings)}),
    )
    assert done.returncode in ((0, 9) if "--json-schema" in line else (0,)), done.stderr
    assert done.stdout.strip() or done.stderr.strip()
    assert "Traceback" not in done.stderr
    if "--json-schema" in line and done.returncode == 0:
        assert list(json.loads(done.stdout)) == ["river"]

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


def test_five_commands_are_shown() -> None:
    assert len(to_try()) == 5


@pytest.mark.parametrize("line", to_try(), ids=lambda line: line.split()[1])
def test_a_command_runs_as_typed(line: str, llmrun: Installed, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("The sky is blue because air scatters blue light more than red light.")
    path = os.pathsep.join([str(Path(llmrun.command).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-c", line],
        input="Hi\n",
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=tmp_path,
        env=llmrun.environment({"PATH": path}),
    )
    assert done.returncode in ((0, 9) if "--json-schema" in line else (0,)), done.stderr
    assert done.stdout.strip()
    if "--json-schema" in line and done.returncode == 0:
        assert list(json.loads(done.stdout)) == ["river"]

"""The installed command with a home that is full, or a file: answers come all the same, and nothing ends as a bug."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.installed import LONG_PROMPT, Installed

COMMANDS = {
    "run": 'echo hi | "$llmrun" run smollm2 -n 4',
    "run --prompt-cache": f'echo "{LONG_PROMPT[:900]}" | "$llmrun" run smollm2 -n 4 --prompt-cache',
    "chat": 'echo hi | "$llmrun" chat smollm2 -n 4',
    "plan": '"$llmrun" plan smollm2',
    "bench": '"$llmrun" bench smollm2 -p 8 -n 2 -r 1 --no-limits',
}
NOTES = {
    "run --prompt-cache": b"The prompt's KV state was not saved",
    "chat": b"This chat is not saved",
    "bench": b"the result was not saved in the history",
}


@pytest.mark.parametrize("home", ["a file", "full"])
@pytest.mark.parametrize("what", COMMANDS)
def test_what_does_not_need_a_home_goes_on(llmrun: Installed, tmp_path: Path, what: str, home: str) -> None:
    place = tmp_path / "place"
    place.touch() if home == "a file" else place.mkdir()
    # No file may grow at all: to a program that is as a full disk, which a test can't have.
    limit = "ulimit -f 0; " if home == "full" else ""
    done = llmrun.shell(limit + COMMANDS[what], env={"LLMRUN_HOME": str(place)})
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert NOTES.get(what, b"") in done.stderr


@pytest.mark.parametrize("arguments", ["chat smollm2 --continue", "sessions list", "bench history"])
def test_what_needs_it_says_why(llmrun: Installed, tmp_path: Path, arguments: str) -> None:
    (tmp_path / "place").touch()
    done = llmrun.run(*arguments.split(), stdin="hi", env={"LLMRUN_HOME": str(tmp_path / "place")})
    assert (done.returncode, done.stdout) == (6, b"")
    assert b"LLMRUN_HOME" in done.stderr

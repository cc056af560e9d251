"""What commands without a model write on terminals of several widths: whole words, and none of Python's own."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from support.screens import PYTHON_WORDS, ReflowingScreen, Terminal, cut_words

from llmrun.cli.app import call
from llmrun.errors import LlmrunError
from llmrun.ui.terminal.output import Output

COMMANDS = (
    "",
    "config",
    "config gett model",
    "config set serve.prot 1",
    "config set serve.port many",
    "config set models.folders nothing",
    "list",
    "ps",
    "rnu smollm2",
    "run",
    "run smolm2 hi",
    "run smollm2 hi --tempp 3",
    "run smollm2 hi --temp hot",
    "run smollm2 hi --continue",
    "run smollm2 -f nothing.txt hi",
    "run ./page.html hi",
    "run smollm2 --tools nothing.py hi",
    "run --preset jack hi",
    "pull smollm2",
    "show qwen3-4b",
    "quantize smollm2 Q2_K",
    "sessions",
    "sessions delete nothing",
    "sessions lsit",
    "stop",
    "logs",
)


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("command", COMMANDS)
def test_screens_have_whole_words(command: str, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.html").write_text("<html>Hello</html>")
    monkeypatch.chdir(tmp_path)
    for name, value in {"LLMRUN_HOME": "home", "HF_HOME": "hub", "HF_HUB_OFFLINE": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal(columns, 24, kind=ReflowingScreen)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, terminal)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    try:
        call(command.split())
    except LlmrunError as error:
        Output().error(error)
    assert isinstance(terminal.screen, ReflowingScreen)
    shown = " ".join(" ".join(terminal.screen.everything()).split())
    assert shown
    assert not cut_words(terminal.screen), shown
    assert not re.search(PYTHON_WORDS, shown), shown
    assert terminal.screen.cursor.x == 0

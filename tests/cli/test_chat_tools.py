"""`llmrun chat --tools` on a pseudo-terminal and in a pipe, over the fake engine, which calls the first tool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gguf_writer import tiny_model, write
from support.installed import Terminal

from llmrun.cli.tools import ToolOptions, page_tools
from llmrun.ui.terminal.output import Output

FRONT = str(Path(__file__).parents[1] / "support/front.py")
FILE = '''
def look(where: str = "") -> str:
    """Looks."""
    return f"{where}: fine \\x1b]0;evil\\x07"
'''
RESULT = "Rome: fine \x1b]0;evil\x07"

pytestmark = [
    pytest.mark.usefixtures("package_on_path"),
    pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal"),
]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a chat with one tool."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"LLMRUN_HOME": str(tmp_path / "home"), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"] + os.pathsep + str(Path(FRONT).parents[1]))
    (tmp_path / "mine.py").write_text(FILE)
    model = write(tmp_path / "tiny.gguf", tiny_model())
    return [sys.executable, FRONT, "calling", "chat", str(model), "--tools", "mine.py"]


@pytest.fixture
def chat(words: list[str]) -> Iterator[Terminal]:
    terminal = Terminal(words, {**os.environ})
    terminal.wait(terminal.at_prompt)
    yield terminal
    terminal.close()


def say(chat: Terminal, message: str, *answers: str) -> list[str]:
    """Type a message, and the answers to the questions that come; gives the lines up to the next prompt."""
    chat.type(message)
    for number, answer in enumerate(answers, 1):
        chat.wait(lambda number=number: sum("Run it?" in line for line in asked(chat, message)) == number)
        chat.press("c") if answer == "^C" else chat.type(answer)
    return chat.wait(lambda: chat.between(message))


def asked(chat: Terminal, message: str) -> list[str]:
    lines = chat.lines
    return lines[max((index for index, line in enumerate(lines) if message in line), default=len(lines)) :]


def test_a_call_is_shown_and_asked_for(chat: Terminal) -> None:
    lines = say(chat, '{"where": "Rome"}', "y")
    assert "Let me see." in lines
    assert not any("tool_call" in line for line in lines)
    assert {"● look", "    where: Rome", "  → Rome: fine"} <= {*lines}
    assert any(line.startswith("I heard: Rome: fine") for line in lines)
    assert b"evil" not in chat.raw
    assert chat.exported(Path.cwd()) == ['{"where": "Rome"}', "Let me see.", RESULT, f"I heard: {RESULT}"]


def test_no_is_told_and_always_asks_no_more(chat: Terminal) -> None:
    assert "I heard: Error: the user does not allow it" in say(chat, '{"where": "Rome"}', "n")
    assert any("I heard: Oslo: fine" in line for line in say(chat, '{"where": "Oslo"}', "a"))
    assert any("I heard: Bonn: fine" in line for line in say(chat, '{"where": "Bonn"}'))


def test_ctrl_c_at_the_question_ends_the_turn_and_not_the_chat(chat: Terminal) -> None:
    assert say(chat, '{"where": "Rome"}', "^C")[-1] == "Stopped."
    assert any("I heard: Oslo: fine" in line for line in say(chat, '{"where": "Oslo"}', "y"))
    chat.press("d")
    assert chat.end() == 0


def test_the_tools_are_listed(chat: Terminal) -> None:
    assert chat.ask("/tools") == ["  look(where)  Looks."]


def test_a_chat_with_calls_goes_on(chat: Terminal, words: list[str]) -> None:
    say(chat, '{"where": "Rome"}', "y")
    chat.type("/bye")
    assert chat.end() == 0
    again = Terminal([*words, "--continue"], {**os.environ})
    again.wait(again.at_prompt)
    assert "● look" in again.lines
    assert any("I heard: Rome: fine" in line for line in again.lines)
    again.close()


def test_in_a_pipe_only_what_is_allowed_runs(words: list[str]) -> None:
    def answer(*options: str) -> tuple[str, str]:
        done = subprocess.run([*words, *options], input='{"where": "Rome"}\n', capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    stdout, stderr = answer()
    assert stdout == "Let me see.\nI heard: Error: the user does not allow it\n"
    assert "--yes-to look" in stderr
    stdout, stderr = answer("--yes-to", "look")
    assert stdout == "Let me see.\nI heard: Rome: fine \n"
    assert "where: Rome" in stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--yes-to", "nothing"], "the tools are look"),
        (["--tools", "nothing.py"], "there is no such file"),
        (["--tool-timeout", "0"], "must be between"),
    ],
)
def test_wrong_options(words: list[str], options: list[str], why: str) -> None:
    done = subprocess.run([*words, *options], input="", capture_output=True, text=True)
    assert done.returncode == 2
    assert why in done.stderr


def test_a_server_of_a_file_that_fails_is_named_for_the_page_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], package_on_path: None
) -> None:
    tools, servers = tmp_path / "tools.py", tmp_path / "mcp.json"
    tools.write_text("def now() -> str:\n    'Tells the time.'\n    return 'noon'\n")
    servers.write_text(json.dumps({"mcpServers": {"broken": {"command": str(tmp_path / "nowhere")}}}))
    with page_tools(Output(), ToolOptions((str(tools), str(servers)), (), 60.0)) as offered:
        assert [tool.name for tool in offered.offered] == ["now"]
    assert "Left out: there are no tools in broken" in " ".join(capsys.readouterr().err.split())

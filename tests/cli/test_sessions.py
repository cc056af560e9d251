"""`llmrun sessions`: what is printed where, and that nothing goes without a yes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.chats import add_turn
from support.damaged_chats import HURT, NAMES, ROWS, hurt, make_chats
from support.streams import Terminal

from llmrun.chat.store.store import Sessions, folder_in
from llmrun.chat.store.turns import Answer, Question
from llmrun.cli import sessions as command
from llmrun.errors import CancelledError
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.ui.terminal.output import Output

pytestmark = pytest.mark.usefixtures("package_on_path", "home")


@pytest.fixture
def chats(home: Path) -> None:
    with Sessions(folder_in(home)) as sessions:
        talk = sessions.new("sky", system="Be brief.")
        add_turn(
            talk,
            Question("Why is the sky blue?"),
            Answer("Rayleigh \x1b[31mscattering.", model=ModelFingerprint("smollm2")),
        )
        talk.make_branch("mars")
        add_turn(talk, Question("And on Mars?"), Answer("Dust."))
        add_turn(sessions.new("cats"), Question("Do cats purr?"), Answer("They do."))


def llmrun(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "llmrun", "sessions", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == status, done.stderr
    return done


def names() -> list[str]:
    return llmrun("list", "-q").stdout.split()


def test_nothing_saved_yet() -> None:
    done = llmrun("list")
    assert (done.stdout, "No saved chats yet" in done.stderr) == ("", True)
    assert json.loads(llmrun("list", "--json").stdout) == []
    assert "there is no saved chat yet" in llmrun("show", status=2).stderr


@pytest.mark.usefixtures("chats")
def test_list() -> None:
    for arguments in (["list"], []):
        heading, cats, sky = llmrun(*arguments).stdout.splitlines()
        assert heading.split() == ["NAME", "TURNS", "MODEL", "USED", "BEGINS", "WITH"]
        assert cats.split()[:2] == ["cats", "1"]
        assert "Why is the sky blue?" in sky
    facts = json.loads(llmrun("list", "--json").stdout)
    assert [(one["name"], one["turns"], one["branches"]) for one in facts] == [("cats", 1, 1), ("sky", 2, 2)]
    assert facts[0]["created"].endswith("+00:00")
    assert names() == ["cats", "sky"]


@pytest.mark.usefixtures("chats")
def test_show() -> None:
    assert llmrun("show").stdout.startswith("# cats\n"), "the one used last"
    sky = llmrun("show", "SKY").stdout
    assert "## System prompt\n\nBe brief." in sky
    assert "Dust." in sky
    assert "Dust." not in llmrun("show", "sky", "--branch", "main").stdout
    assert json.loads(llmrun("show", "sky", "--json").stdout)["branches"].keys() == {"main", "mars"}
    error = llmrun("show", "skye", status=2).stderr
    assert "there is no saved chat 'skye'" in error
    assert "did you mean sky?" in error


@pytest.mark.usefixtures("chats")
def test_a_terminal_gets_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        stdout = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr(command, "Output", lambda json=False, stdout=stdout: Output(json=json, stdout=stdout))
        command.show_session("sky", "main")
        assert ("\x1b" in stdout.getvalue()) != terminal
        assert "scattering." in stdout.getvalue()
    whole = stdout.getvalue().replace("\x1b[31m", "")
    monkeypatch.setenv("COLUMNS", "12")
    narrow = Terminal()
    monkeypatch.setattr(command, "Output", lambda json=False: Output(json=json, stdout=narrow))
    command.show_session("sky", "main")
    assert narrow.getvalue().split() == whole.split(), "wrapped between words"
    assert narrow.getvalue().count("\n") > whole.count("\n")


@pytest.mark.usefixtures("chats")
def test_export_and_import(tmp_path: Path) -> None:
    assert llmrun("export", "sky").stdout.startswith("# sky\n")
    assert [json.loads(line)["role"] for line in llmrun("export", "sky", "-f", "jsonl").stdout.splitlines()] == [
        "system", "user", "assistant", "user", "assistant"
    ]  # fmt: skip
    assert len(json.loads(llmrun("export", "sky", "-f", "openai", "-b", "main").stdout)["messages"]) == 3
    target = tmp_path / "sky.json"
    done = llmrun("export", "sky", "-o", str(target))
    assert (done.stdout, "as json" in done.stderr) == ("", True)
    before = target.read_bytes()
    assert "exists already" in llmrun("export", "cats", "-o", str(target), status=2).stderr
    assert target.read_bytes() == before
    llmrun("export", "sky", "-y", "-o", str(target))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["sky.json"]
    assert "Saved as sky-2" in llmrun("import", str(target)).stderr
    assert json.loads(llmrun("import", str(target), "--name", "other", "--json").stdout)["turns"] == 2
    assert sorted(names()) == ["cats", "other", "sky", "sky-2"]
    assert "there is no folder" in llmrun("export", "sky", "-o", str(tmp_path / "no" / "x.md"), status=2).stderr
    assert "no such file" in llmrun("import", str(tmp_path / "missing"), status=2).stderr
    target.write_text("{}")
    assert "not an exported chat" in llmrun("import", str(target), status=2).stderr


@pytest.mark.usefixtures("chats")
def test_rename() -> None:
    assert "Renamed sky to heaven." in llmrun("rename", "sky", "heaven").stderr
    assert names() == ["cats", "heaven"]
    assert "already a saved chat" in llmrun("rename", "cats", "heaven", status=2).stderr


@pytest.mark.usefixtures("chats")
def test_rm_needs_a_yes() -> None:
    refused = llmrun("rm", "sky", status=2)
    assert "try: llmrun sessions rm -y sky" in refused.stderr
    assert "there is no saved chat 'nope'" in llmrun("rm", "-y", "sky", "nope", status=2).stderr
    assert names() == ["cats", "sky"], "all or nothing"
    done = llmrun("rm", "-y", "sky", "1", "--json")
    assert [one["name"] for one in json.loads(done.stdout)] == ["sky"]
    assert names() == ["cats"]


@pytest.mark.usefixtures("chats")
def test_rm_asks_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, left in (("n\n", ["cats", "sky"]), ("y\n", ["cats"])):
        stderr = Terminal()
        output = Output(stdin=Terminal(answer), stdout=io.StringIO(), stderr=stderr)
        monkeypatch.setattr(command, "Output", lambda json=False, output=output: output)
        if answer == "n\n":
            with pytest.raises(CancelledError):
                command.remove_sessions(["sky"])
        else:
            command.remove_sessions(["sky"])
        assert "Delete 1 chat?" in stderr.getvalue()
        assert "2 turns, Why is the sky blue?" in stderr.getvalue()
        assert names() == left


@pytest.mark.usefixtures("chats")
def test_search() -> None:
    heading, hit = llmrun("search", "SKY", "blu").stdout.splitlines()
    assert heading.split() == ["NAME", "TURN", "WHO", "SAID", "TEXT"]
    assert hit.split()[:3] == ["sky", "1", "you"]
    (hit,) = json.loads(llmrun("search", "rayleigh", "--json").stdout)
    assert (hit["session"], hit["role"], hit["turn"]) == ("sky", "assistant", 1)
    done = llmrun("search", "nobody")
    assert (done.stdout, "No message contains 'nobody'" in done.stderr) == ("", True)


@pytest.mark.usefixtures("chats")
def test_names_are_completed(home: Path) -> None:
    with Sessions(folder_in(home)) as sessions:
        add_turn(sessions.new("$(reboot)"), Question("x"), Answer("y"))
    assert command.complete_session("") == ["cats", "sky"], "a shell evaluates what it gets"
    assert command.complete_session("s") == ["sky"]
    (home / "sessions" / "sessions.db").write_bytes(b"")
    assert command.complete_session("s") == []


def test_a_damaged_file_is_told(home: Path) -> None:
    (home / "sessions").mkdir(parents=True)
    (home / "sessions" / "sessions.db").write_bytes(b"no database" * 1000)
    done = llmrun("list")
    assert "sessions.db was damaged. It is kept as" in done.stderr
    assert "damaged" not in llmrun("list").stderr


def test_one_damaged_chat_leaves_the_others(home: Path) -> None:
    statement, said = ROWS["its own parent"]
    folder = folder_in(home)
    make_chats(folder)
    hurt(folder, statement)
    for arguments in (["list"], ["search", "question"]):
        done = llmrun(*arguments)
        assert [f"{name} " in done.stdout for name in NAMES] == [True, True, False, True, True]
        assert done.stderr.count("is damaged") == 1
        assert said in done.stderr
    error = llmrun("show", str(HURT), status=6).stderr
    assert said in error
    assert f"try: llmrun sessions rm {HURT}" in error
    assert said in llmrun("export", str(HURT), status=6).stderr
    assert said in llmrun("rm", "-y", str(HURT)).stderr
    assert "damaged" not in llmrun("list").stderr

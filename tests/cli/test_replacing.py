"""No command replaces a file unasked, whatever option names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.chats import add_turn
from support.gguf_writer import write
from support.quantize_engine import Engine, model

from llmrun.chat.store.store import Sessions, folder_in
from llmrun.chat.store.turns import Answer, Question
from llmrun.cli.app import app, call
from llmrun.cli.commands import COMMANDS
from llmrun.cli.options import check_output_file
from llmrun.errors import CancelledError, UsageError
from llmrun.runner import client
from llmrun.ui.terminal.output import Output

MODEL, MINE = "tiny-F16.gguf", b"mine, without a newline"
WRITES = {
    ("run", "--record"): (("run", MODEL, "hi", "--record", "mine.json"),),
    ("explain", "--html"): (("explain", MODEL, "hi", "--html", "mine.html"),),
    ("embed", "--output"): (("embed", MODEL, "hi", "-o", "mine.npy"),),
    ("bench", "--output"): (
        ("bench", MODEL, "-o", "mine.html"),
        ("bench", MODEL, "--json", "-o", "mine.csv"),
        ("bench", MODEL, "--clients", "2", "-o", "mine.html"),
        ("bench", "history", "last", "-o", "mine.md"),
    ),
    ("quantize", "out"): (("quantize", MODEL, "mine.gguf", "--type", "q4_0"),),
    ("quantize", "--output"): (("quantize", MODEL, "-o", "mine.gguf", "--type", "q4_0"),),
    ("quantize", "--report-to"): (("quantize", MODEL, "--report", "--report-to", "mine.html"),),
    ("report", "--output"): (("report", MODEL, "-o", "mine.md"),),
    ("convert", "out"): (("convert", "folder", "mine.gguf"),),
    ("sessions export", "--output"): (("sessions", "export", "-o", "mine.json"),),
}
ELSEWHERE = {("batch", "--output"), ("report", "out")}  # they never replace what is not theirs, see their own tests
READS = {"--key-file", "--text", "--calibration", "--with", "rows", "file", "folder"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A folder with a model and a saved chat, and an engine that nothing is asked of."""
    found = Engine("Q4_0")
    monkeypatch.setattr(client, "prestarted", lambda: found)
    for name in ("LLMRUN_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / MODEL, model("F16"))
    with Sessions(folder_in(tmp_path / "home")) as sessions:
        add_turn(sessions.new("sky"), Question("Why?"), Answer("So."))
    yield found
    assert not found.commands


@pytest.mark.parametrize("words", [words for cases in WRITES.values() for words in cases], ids=" ".join)
def test_what_is_there_is_not_replaced_where_nobody_can_be_asked(words: tuple[str, ...]) -> None:
    target = Path(next(word for word in words if word.startswith("mine")))
    target.write_bytes(MINE)
    with pytest.raises(UsageError, match="exists already") as caught:
        call(words)
    assert caught.value.why == "there is no terminal to ask on"
    assert "-y" in caught.value.hint
    assert target.read_bytes() == MINE


def test_every_path_that_a_command_takes_is_one_of_these() -> None:
    def paths(name: str, command: Any) -> Iterator[tuple[str, str]]:
        for word, each in getattr(command, "commands", {}).items():
            yield from paths(f"{name} {word}", each)
        for parameter in command.params:
            flag = max(parameter.opts, key=len)
            if parameter.type.name == "path" or flag == "--output":
                yield name, flag

    root: Any = typer.main.get_command(app)
    found = {each for name in COMMANDS for each in paths(name, root.get_command(None, name))}
    assert {each for each in found if each[1] not in READS} == {*WRITES, *ELSEWHERE}


class Asked(Output):
    """A terminal whose user gives one answer."""

    can_ask = True  # type: ignore[assignment]

    def __init__(self, answer: bool) -> None:
        super().__init__()
        self.answer, self.questions = answer, list[str]()

    def confirm(self, question: str, *, enter: bool = False) -> bool:
        """Note the question."""
        self.questions.append(question)
        return self.answer


def test_the_user_is_asked() -> None:
    target = Path("mine.md")
    nobody = Asked(answer=False)
    check_output_file(nobody, target, yes=False)
    target.write_bytes(MINE)
    check_output_file(nobody, target, yes=True)
    assert not nobody.questions
    with pytest.raises(CancelledError):
        check_output_file(nobody, target, yes=False)
    assert nobody.questions == ["mine.md exists already. Replace it?"]
    check_output_file(Asked(answer=True), target, yes=False)


def test_devices_and_folders() -> None:
    check_output_file(Asked(answer=False), Path("/dev/null"), yes=False)
    with pytest.raises(UsageError, match="is a folder"):
        check_output_file(Asked(answer=True), Path(), yes=True)

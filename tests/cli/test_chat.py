"""`llmrun chat` on a pseudo-terminal, over the fake engine."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.gguf_writer import tiny_adapter, tiny_model, write
from support.installed import Terminal
from support.tiny_projector import png, projector

from llmrun.cli.slash import show_help, think
from llmrun.cli.tools import ToolOptions, Tools, page_tools, toolbox
from llmrun.errors import UsageError
from llmrun.protocol.messages import AnswerRequest, ToolCall
from llmrun.ui.answer.view import DisplayOptions
from llmrun.ui.terminal.output import Output

FRONT = str(Path(__file__).parents[1] / "support/front.py")
Start = Callable[..., Terminal]

pytestmark = [
    pytest.mark.usefixtures("package_on_path"),
    pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal"),
]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """start(mode, option, ...): a chat with the fake engine, at its first prompt."""
    model = write(tmp_path / "tiny.gguf", tiny_model())
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"] + os.pathsep + str(Path(FRONT).parents[1]))
    open_ones: list[Terminal] = []

    def make(mode: str, *options: str, **environment: str) -> Terminal:
        words = [sys.executable, FRONT, mode, "chat", str(model), *options]
        home = {"LLMRUN_HOME": str(tmp_path / "home"), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
        open_ones.append(Terminal(words, {**os.environ, **home, **environment}))
        open_ones[-1].wait(open_ones[-1].at_prompt)
        return open_ones[-1]

    yield make
    for terminal in open_ones:
        terminal.close()


def test_a_crash_of_the_engine_loses_nothing(start: Start) -> None:
    chat = start("die:decode:SIGSEGV,normal")
    died = chat.ask("Why is the sky blue?")
    assert any("SIGSEGV" in line for line in died)
    assert any("/retry" in line for line in died)
    assert "Hello" in chat.ask("/retry")


def test_a_killed_chat_loses_no_question(start: Start) -> None:
    chat = start("deaf")
    chat.type("Why is the sky blue?")
    chat.wait(lambda: any("TTFT" in line for line in chat.lines))  # its first text has come
    os.kill(chat.pid, signal.SIGKILL)
    chat.end()
    again = start("normal", "--continue")
    assert any("Why is the sky blue?" in line for line in again.lines)
    assert any("/retry" in line for line in again.lines)
    assert "Hello" in again.ask("/retry")


def test_the_last_free_chat_goes_on_where_another_run_has_the_newest(start: Start) -> None:
    first = start("normal")
    first.ask("Why is the sky blue?")
    first.type("/bye")
    assert first.end() == 0
    busy = start("normal")
    busy.ask("How far is the moon?")
    again = start("normal", "--continue")
    assert any("how-far-is-the-moon is open in another llmrun" in line for line in again.lines)
    assert any("Resuming why-is-the-sky-blue" in line for line in again.lines)


def test_what_is_remembered_is_said_in_later_chats(start: Start, tmp_path: Path) -> None:
    off = start("normal")
    assert any("llmrun config set notes on" in line for line in off.ask("/remember I live in Oslo"))
    assert "Notes across chats are off: llmrun config set notes on" in off.ask("/remember")
    chat = start("normal", LLMRUN_NOTES="on")
    assert not any("your notes" in line for line in chat.lines)
    assert any("There are no notes in" in line for line in chat.ask("/remember"))
    assert any("for this chat and later ones" in line for line in chat.ask("/remember I live in Oslo"))
    assert "- I live in Oslo" in chat.ask("/remember")
    later = start("normal", LLMRUN_NOTES="on")
    assert "holds your notes" in " ".join(later.lines)
    assert "holds your notes" in " ".join(later.ask("/system"))
    assert (tmp_path / "home/notes.md").read_text() == "- I live in Oslo\n"


def test_a_chat_that_is_ended_keeps_what_came(start: Start) -> None:
    chat = start("deaf")
    chat.type("Why is the sky blue?")
    chat.wait(lambda: any("TTFT" in line for line in chat.lines))  # its first text has come
    os.kill(chat.pid, signal.SIGTERM)
    assert chat.end() == 143
    again = start("normal", "--continue")
    assert "Hel" in again.lines
    assert any("cut off" in line for line in again.lines)


def test_figures_and_reasons_of_a_chat_that_goes_on(start: Start) -> None:
    chat = start("normal")
    chat.ask("Why is the sky blue?")
    chat.type("/bye")
    assert chat.end() == 0
    assert "Saved. To resume: llmrun chat --session why-is-the-sky-blue" in chat.lines
    again = start("normal", "--continue")
    assert any("decode 2 tokens" in line for line in again.ask("/stats"))
    why = again.ask("/why")
    assert any("last sampled answer of this run only" in line for line in why)
    assert any("/retry" in line for line in why)
    assert any("last sampled answer of this run only" in line for line in again.ask("/explain"))


def test_of_several_answers_the_user_keeps_one(start: Start) -> None:
    chat = start("normal")
    chat.ask("Name a river")
    chat.type("/retry 3")
    chat.wait(lambda: any(line.startswith("Which answer to keep? [1/2/3]") for line in chat.lines))
    (heads,) = (line for line in chat.lines if line.startswith("1. seed "))
    assert [head.strip()[:8] for head in heads.split("│")] == ["1. seed ", "2. seed ", "3. seed "]
    chat.type("2")
    chat.wait(chat.at_prompt)
    assert any(line.startswith("Which answer to keep? [1/2/3] 2") for line in chat.lines)
    assert sum(line.startswith(("* ", "  #")) for line in chat.ask("/branch")) == 4


@pytest.mark.parametrize("count", ["1", "10", "x", "-2"])
def test_a_number_of_answers_that_can_not_be_is_refused(start: Start, count: str) -> None:
    chat = start("normal")
    chat.ask("Name a river")
    assert f"error: invalid /retry {count}" in chat.ask(f"/retry {count}")


def test_undo_takes_no_number(start: Start) -> None:
    chat = start("normal")
    chat.ask("Name a river")
    assert "error: invalid /undo 2" in chat.ask("/undo 2")
    assert any('Removed: "Name a river"' in line for line in chat.ask("/undo"))
    assert "* main: 0 turns, current" in chat.ask("/branch")


def test_branches_say_where_they_differ(start: Start) -> None:
    chat = start("normal")
    assert "There is no branch yet: ask something first." in chat.ask("/branch")
    chat.ask("Name a river")
    chat.ask("/edit Name a mountain")
    shown = chat.ask("/branch")
    assert any('differs from turn 1 on: "Name a river"' in line for line in shown)


def test_a_branch_that_is_not_there_is_an_error(start: Start) -> None:
    chat = start("normal")
    chat.ask("Name a river")
    refused = " ".join(chat.ask("/branch mian"))
    assert "error: there is no branch 'mian'" in refused
    assert "did you mean main?" in refused
    assert "/branch new mian starts one here" in refused
    assert "* main: 1 turn, current" in " ".join(chat.ask("/branch")), "nothing was started"
    assert "Started the branch side." in chat.ask("/branch new side")
    assert "Switched to main." in chat.ask("/branch main")


def test_a_cleared_chat_says_where_its_turns_are(start: Start) -> None:
    chat = start("normal")
    assert "The conversation is empty already." in chat.ask("/clear")
    chat.ask("Name a river")
    cleared = " ".join(chat.ask("/clear"))
    (name,) = re.findall(r"/branch (#\d+) returns to its 1 turn", cleared)
    chat.type("exit")
    assert chat.end() == 0
    again = start("normal", "--continue")
    assert any(f"which was cleared: /branch {name} returns" in line for line in again.lines)
    again.ask(f"/branch {name}")
    assert any('Removed: "Name a river"' in line for line in again.ask("/undo"))


def test_set_shows_the_usual_parameters_and_what_was_changed(start: Start) -> None:
    chat = start("normal", "--dry-base", "1.9")
    shown = chat.ask("/set")
    assert len(shown) <= 20
    assert any("--temp" in line for line in shown)
    assert any("--dry-base" in line and "flag" in line for line in shown)
    assert not any("--mirostat" in line for line in shown)
    assert "/set all" in shown[-1]
    assert any("--mirostat" in line for line in chat.ask("/set all"))


@pytest.mark.parametrize("columns", [60, 100])
def test_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(Output, "columns", lambda self, *, stderr=False: columns)
    shown = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    chat: Any = SimpleNamespace(output=shown)
    show_help(chat, "")
    lines = shown.stderr.getvalue().splitlines()
    assert len(lines) <= 30
    assert any("/help [all]" in line for line in lines)


def test_think_changes_one_thing_at_a_time() -> None:
    settings, notes = SimpleNamespace(request=AnswerRequest()), list[str]()
    model = SimpleNamespace(thinks=True, name="tiny")
    chat: Any = SimpleNamespace(
        conversation=SimpleNamespace(settings=settings, model=model),
        shown_as=DisplayOptions(),
        output=SimpleNamespace(note=notes.append),
    )

    def state(word: str) -> tuple[object, ...]:
        think(chat, word)
        request = settings.request
        return request.thinking, request.thinking_tokens, request.reasoning_effort, chat.shown_as.think

    assert state("on") == (True, None, None, "on")
    assert state("100") == (True, 100, None, "on")
    assert state("off") == (False, 100, None, "on")
    assert state("low") == (None, 100, "low", "on")
    assert state("hide") == (None, 100, "low", "hide")
    for word in ("", "perhaps", "99999999999"):
        with pytest.raises(UsageError, match="invalid /think"):
            think(chat, word)
    assert not notes
    model.thinks = False
    assert state("fold") == (None, 100, "low", "fold")
    assert notes == ["tiny has no thinking mode."]


def test_drafts_are_told_and_can_be_switched_off(start: Start) -> None:
    chat = start("long")
    assert any("drafted 70, accepted 68" in line for line in chat.ask("Why is the sky blue?"))
    chat.ask("/speculation off")
    assert not any("drafted" in line for line in chat.ask("And green?"))
    assert any("up to 7 per step" in line for line in chat.ask("/speculation 7"))
    assert any("must be auto, off, or a number" in line for line in chat.ask("/speculation 99"))
    assert any("drafted" in line for line in chat.ask("And now?"))


def test_a_disk_that_refuses(start: Start) -> None:
    chat = start("normal", LLMRUN_HOME="/proc/nothing")
    assert any("not saved" in line for line in chat.lines)
    assert "Hello" in chat.ask("hi")
    assert chat.ask("/save river") == ["This chat is now called river: it is not saved"]
    chat.press("d")
    assert chat.end() == 0


def test_seed_is_set_like_every_sampling_value(start: Start) -> None:
    chat = start("normal")
    assert any("Unknown command /seed" in line for line in chat.ask("/seed 7"))
    assert any("now 7." in line for line in chat.ask("/set seed 7"))


def test_a_chat_remembers_its_adapters(start: Start, tmp_path: Path) -> None:
    adapter = write(tmp_path / "pirate.gguf", tiny_adapter())
    chat = start("normal", "--lora", f"{adapter}:0.5")
    chat.ask("Why is the sky blue?")
    chat.type("/quit")
    chat.end()
    again = start("normal", "--continue")
    assert any("Going on with the adapter pirate, scale 0.5." in line for line in again.lines)
    again.ask("Why?")
    again.type("/quit")
    again.end()
    adapter.unlink()
    without = start("normal", "--continue")
    assert any("Going on without the adapter pirate" in line for line in without.lines)


def test_beams_answer_the_last_question(start: Start) -> None:
    chat = start("normal")
    assert any("no question" in line for line in chat.ask("/beams"))
    chat.ask("What is the capital of Italy?")
    assert any("invalid /beams many" in line for line in chat.ask("/beams many"))
    assert any("invalid /beams 1" in line for line in chat.ask("/beams 1"))
    shown = chat.ask("/beams 2")
    assert "Rome" in shown
    assert any("2 beams: 1 step" in line for line in shown)
    (said,) = (at for at, line in enumerate(shown) if line.startswith("Searching; Ctrl-C ends the search"))
    assert said < shown.index("Rome"), "how to stop is said before the answer"
    assert any("no answer to explain" in line for line in chat.ask("/why"))
    assert any("prefill 5 tokens" in line for line in chat.ask("/stats"))


def test_quotes_around_an_argument_are_not_part_of_it(start: Start, tmp_path: Path) -> None:
    chat = start("normal")
    assert "System prompt: Be brief." in chat.ask('/system "Be brief."')
    assert 'System prompt: Say "yes"' in chat.ask('/system Say "yes"')
    assert 'System prompt: "yes" or "no"' in chat.ask('/system "yes" or "no"')
    chat.ask("Name a river")
    assert "Started the branch other way." in chat.ask("/branch new 'other way'")
    assert any(line.startswith("This chat is now called my trip: ") for line in chat.ask("/save 'my trip'"))
    chat.ask(f"/export '{tmp_path / 'my trip.md'}'")
    assert (tmp_path / "my trip.md").is_file()
    assert any("Resuming my trip" in line for line in chat.ask("/load 'my trip'"))


def test_help_is_a_table_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Output, "columns", lambda self, *, stderr=False: 80)
    shown = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    chat: Any = SimpleNamespace(output=shown)
    show_help(chat, "all")
    lines = shown.stderr.getvalue().splitlines()
    retry = next(number for number, line in enumerate(lines) if line.startswith("/retry"))
    beside = lines[retry].index("answer the last question")
    assert lines[retry + 1].startswith(" " * beside + "and keep one answer"), "below the text, not below the name"
    assert max(map(len, lines)) <= 80


def test_a_message_that_begins_with_a_slash(start: Start) -> None:
    chat = start("normal")
    refused = chat.ask("/usr/bin is what?")
    assert "Unknown command /usr/bin: /? lists all. To send it as a message: //usr/bin is what?" in " ".join(refused)
    assert any("Unknown command /branches: did you mean /branch?" in line for line in chat.ask("/branches"))
    assert "Hello" in chat.ask("//usr/bin is what?")
    assert any('Removed: "/usr/bin is what?"' in line for line in chat.ask("/undo"))


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "exit()"])
def test_words_that_leave(start: Start, word: str) -> None:
    chat = start("normal")
    chat.type(word)
    assert chat.end() == 0


def test_edit_says_what_it_does_and_does_it(start: Start) -> None:
    chat = start("normal")
    assert any("/edit [TEXT]" in line for line in chat.ask("/help"))
    chat.ask("Name a river")
    chat.type("/edit")
    chat.wait(lambda: chat.lines[-1:] == [">>> Name a river"])
    chat.type(" in Asia")
    chat.wait(lambda: chat.at_prompt() and "Hello" in chat.lines[-3:])
    assert any('Removed: "Name a river in Asia"' in line for line in chat.ask("/undo"))


def test_a_command_typed_over_the_question_to_edit_is_obeyed(start: Start) -> None:
    chat = start("normal")
    chat.ask("Name a river")
    chat.type("/edit")
    chat.wait(lambda: chat.lines[-1:] == [">>> Name a river"])
    chat.press("u")
    chat.type("exit")
    assert chat.end() == 0


def test_edited_questions_keep_their_files(start: Start, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("The river is the Seine.")
    chat = start("normal")
    chat.ask(f"/file {notes}")
    chat.ask("Which river?")
    chat.ask("/edit Which city?")
    exported = tmp_path / "chat.json"
    chat.ask(f"/export {exported}")
    assert exported.read_text().count("The river is the Seine.") == 2


def test_attached_files(start: Start, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "my notes.txt"):
        (tmp_path / name).write_text("x" * 35)
    chat = start("normal")
    assert any("Nothing is attached" in line for line in chat.ask("/files"))
    assert any("2 files, about 20 tokens" in line for line in chat.ask(f"/file {tmp_path}/?.txt"))
    assert any("3 files, about 30 tokens" in line for line in chat.ask(f"/file {tmp_path}/my notes.txt"))
    assert "my notes.txt: 35 B, about 10 tokens" in " ".join(chat.ask("/files"))  # a long path is wrapped
    assert any("2 files" in line for line in chat.ask("/file --drop a.txt"))
    assert any("is not attached" in line for line in chat.ask("/file --drop c.txt"))
    assert any("/file --drop needs a name" in line for line in chat.ask("/file --drop"))
    assert any("1 file," in line for line in chat.ask("/file --drop b.txt"))
    assert any("Nothing is attached" in line for line in chat.ask("/file --drop 'my notes.txt'"))
    assert any("/image --drop needs a name" in line for line in chat.ask("/image --drop"))


def test_files_of_a_question_that_failed_are_not_sent_with_the_next_one(start: Start, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 35)
    chat = start("die:decode:SIGSEGV,normal")
    chat.ask(f"/file {tmp_path}/a.txt")
    assert any("/retry asks it again" in line for line in chat.ask("What is in it?"))
    assert any("Nothing is attached" in line for line in chat.ask("/files"))
    exported = tmp_path / "chat.md"
    chat.ask("/retry")
    chat.ask("And now?")
    chat.ask(f"/export {exported}")
    assert exported.read_text().count("x" * 35) == 1


@pytest.mark.parametrize(
    ("mode", "is_saved"), [("die:render:SIGSEGV,normal", False), ("die:decode:SIGSEGV,normal", True)]
)
def test_one_sentence_about_a_question_whose_image_the_engine_died_on(
    start: Start, tmp_path: Path, mode: str, *, is_saved: bool
) -> None:
    (tmp_path / "cat.png").write_bytes(png(8, 8))
    chat = start(mode, "--mmproj", str(projector(tmp_path / "eyes.gguf", 64)))
    chat.ask(f"/image {tmp_path}/cat.png")
    died = chat.ask("What is in it?")
    assert any("SIGSEGV" in line for line in died)
    removed = any("The question and its files were removed." in line for line in died)
    saved = any("The question is saved. /retry asks it again." in line for line in died)
    assert (removed, saved) == (not is_saved, is_saved)
    assert any("Nothing is attached" in line for line in chat.ask("/files"))
    assert ("Hello" in chat.ask("/retry")) == is_saved


def test_an_export_does_not_replace_a_file_unasked(start: Start, tmp_path: Path) -> None:
    chat = start("normal")
    chat.ask("Name a river")
    mine = tmp_path / "mine.md"
    mine.write_text("mine")
    chat.type(f"/export {mine}")
    chat.wait(lambda: "Replace it? [y/N]" in " ".join(chat.lines))
    chat.type("n")
    chat.wait(chat.at_prompt)
    assert mine.read_text() == "mine"
    chat.type(f"/export {mine}")
    chat.wait(lambda: " ".join(chat.lines).count("Replace it? [y/N]") == 2)
    chat.type("y")
    chat.wait(chat.at_prompt)
    assert "Name a river" in mine.read_text()


# ---- `llmrun chat --tools` on a pseudo-terminal and in a pipe, over the fake engine, which calls the first tool


FILE = '''
def look(where: str = "") -> str:
    """Looks."""
    return f"{where}: fine \\x1b]0;evil\\x07"
'''
RESULT = "Rome: fine \x1b]0;evil\x07"


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


def test_tools_are_switched(chat: Terminal) -> None:
    (Path.cwd() / "notes.txt").write_text("from the folder")
    assert chat.ask("/tools off look")[0] == "  look  is off"
    assert any("read_file(path, line)" in line for line in chat.ask("/tools on files"))
    assert any("I heard: from the folder" in line for line in say(chat, '{"path": "notes.txt"}', "y"))
    listed = " ".join(" ".join(chat.ask("/tools on look")).split())
    assert "look(where) Looks." in listed
    assert "is off" not in listed
    assert any(line.split() == ["read_file", "is", "off"] for line in chat.ask("/tools off files"))
    assert any("there is no tool nothing" in line for line in chat.ask("/tools off nothing"))
    assert any("There are no tools" in line for line in chat.ask("/tools off all"))


def test_a_tool_that_is_off_does_not_run(tmp_path: Path, package_on_path: None) -> None:
    (tmp_path / "a").write_text("one")
    options = ToolOptions((f"files:{tmp_path}",), ("read_file",), 600.0)
    call = ToolCall("1", "read_file", '{"path": "a"}')
    with toolbox(options) as box, ExitStack() as opened:
        tools = Tools(Output(), box, options)
        assert tools.answer(call).text == "one"
        tools.switch("read_file", opened, is_on=False)
        assert [tool.name for tool in tools.offered] == ["list_files"]
        assert tools.answer(call).text == "Error: there is no tool read_file"


def test_a_chat_without_tools_gets_some(words: list[str]) -> None:
    (Path.cwd() / "notes.txt").write_text("from the folder")
    chat = Terminal([word for word in words if word not in ("--tools", "mine.py")], {**os.environ})
    chat.wait(chat.at_prompt)
    assert chat.ask("/tools") == ["There are no tools: /tools on files, web, python, all or FILE.py adds some."]
    assert any("list_files(folder, recursive)" in line for line in chat.ask("/tools on files"))
    assert "I heard: Error: the user does not allow it" in say(chat, '{"path": "notes.txt"}', "n")
    chat.type("/bye")
    assert chat.end() == 0


def test_code_is_shown_as_it_would_run(words: list[str]) -> None:
    chat = Terminal([*words[:-1], "python"], {**os.environ})
    chat.wait(chat.at_prompt)
    lines = say(chat, '{"code": "for x in range(2):\\n    print(x)"}', "y")
    shown = lines.index("    code: for x in range(2):")
    assert lines[shown + 1] == "          print(x)"
    assert "  → 0 1" in lines
    chat.close()


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
    assert stdout.startswith("Let me see.\nI heard: Error: it was not run: there is nobody here who could be asked")
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
        assert [tool.name for tool in offered.offered()] == ["now"]
    assert "Left out: there are no tools in broken" in " ".join(capsys.readouterr().err.split())

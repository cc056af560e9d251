"""The chat's input on real pseudo-terminals: small, resized, dumb, without colour, without UTF-8, suspended."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pyte
import pytest
from support.effort import loop_seconds
from support.screens import CachedScreen

SECONDS = 120.0
MOST_LOOPS = 60  # of work for a paste of 2,000 lines, see support/effort
CTRL_C, CTRL_D, CTRL_G, CTRL_L, CTRL_R, CTRL_Z, ALT_ENTER = "\x03", "\x04", "\x07", "\x0c", "\x12", "\x1a", "\x1b\r"
PASTE, PASTED = "\x1b[200~", "\x1b[201~"

CHAT = """
import sys, time
from pathlib import Path
from llmrun.ui.prompt.input import ChatInput
from llmrun.ui.prompt.completion import Candidate, file_names
from llmrun.ui.terminal.output import Output

commands = {
    "/help": None,
    "/file": file_names,
    "/many": lambda words: [Candidate(str(number), "of many " * 9) for number in range(10, 50)],
    "/set": lambda words: [Candidate("temperature", "0 to 2"), Candidate("top_k", "0 to 1000")],
}
output = Output()
with ChatInput(output, Path("history"), commands=commands) as reader:
    while (message := reader.read()) is not None:
        if message == "wait":
            print("waiting", flush=True)
            time.sleep(1)
        if message == "work":
            with reader.unechoed():
                print("working", flush=True)
                while not Path("continue").exists():
                    time.sleep(0.02)
            continue
        if reader.is_command and message == "/multiline":
            reader.multiline = not reader.multiline
            output.note(reader.multiline_hint)
            continue
        if reader.is_command and message == "/edit":
            reader.prefill("/once\\nsaid")
            continue
        print("command" if reader.is_command else "message", ascii(message), flush=True)
print("left", flush=True)
Path("left").touch()
"""


class Chat:
    """A reader of messages in a terminal, and the screen as a user sees it."""

    def __init__(self, folder: Path, *, columns: int = 80, rows: int = 24, **environment: str) -> None:
        clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "VISUAL", "EDITOR")}
        self.screen = CachedScreen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.child = pexpect.spawn(
            "bash",
            ["-c", f"set -m; '{sys.executable}' -c \"$0\"; test -e left || {{ touch suspended; fg; }}", CHAT],
            cwd=str(folder),
            env={**clean, "TERM": "xterm-256color", **environment},
            dimensions=(rows, columns),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a job in the background ignores
        )
        self.child.delaybeforesend = None
        self.wait(self.at_prompt)

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Read what comes until the condition is true."""
        ends = time.monotonic() + SECONDS
        while not (value := condition()):
            assert time.monotonic() < ends, "\n".join(["this is on the screen:", *self.lines])
            try:
                data = self.child.read_nonblocking(1 << 16, timeout=0.02)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                value = condition()
                assert value, "\n".join(["it ended with this on the screen:", *self.lines])
                break
            self.raw += data
            self._stream.feed(data)
        return value

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def at_prompt(self) -> bool:
        return self.screen.display[self.screen.cursor.y].rstrip() == ">>>"

    def press(self, *keys: str) -> None:
        self.child.send("".join(keys))

    def type(self, text: str) -> None:
        """Type, and wait until it is on the screen."""
        self.press(text)
        last = text.split("\n")[-1]
        self.wait(lambda: last in self.screen.display[self.screen.cursor.y])

    def gives(self, *keys: str) -> str:
        """The kind and text of the message that these keys make."""
        before = self.raw.count(b"command '") + self.raw.count(b"message '")
        self.press(*keys)
        self.wait(lambda: self.raw.count(b"command '") + self.raw.count(b"message '") > before and self.at_prompt())
        return re.findall(rb"(?:command|message) '[^\r\n]*'", self.raw)[-1].decode()

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    def end(self) -> None:
        """End what is still running."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.child.pid).children(recursive=True):
                process.kill()
        self.child.ptyproc.delayafterclose = self.child.delayafterclose = 0.02
        self.child.close(force=True)

    def left(self) -> bool:
        return self.lines[-1:] == ["left"]


@pytest.fixture
def chat(tmp_path: Path, package_on_path: None) -> Iterator[Callable[..., Chat]]:
    """chat(columns=, rows=, NAME=value): a chat at its first prompt."""
    chats: list[Chat] = []

    def start(**options: Any) -> Chat:
        chats.append(Chat(tmp_path, **options))
        return chats[-1]

    yield start
    for started in chats:
        started.end()


def test_a_paste_is_one_message_whatever_is_in_it(chat: Callable[..., Chat]) -> None:
    typed = chat()
    text = '/clear\r\n"""\r\n/bye\r\n\tdef f():\r\x1b[31m\n>>> end'
    given = typed.gives(PASTE, text, PASTED, "\r")
    assert given == "message " + ascii('/clear\n"""\n/bye\n\tdef f():\n\x1b[31m\n>>> end')
    assert typed.gives('"""', PASTE, 'x = """doc"""\n/bye', PASTED, '"""\r') == 'message \'x = """doc"""\\n/bye\''
    assert typed.gives("/help ", PASTE, "a\nb", PASTED, "\r") == "command '/help a\\nb'"
    assert typed.gives(PASTE, "/help", PASTED, "\r") == "command '/help'"
    assert typed.gives(PASTE, "/a\nb", PASTED, CTRL_C, "/help\r") == "command '/help'"


def test_a_long_paste_is_one_row_and_one_entry_of_the_history(chat: Callable[..., Chat], tmp_path: Path) -> None:
    typed = chat()
    text = "\n".join(f"line {number}" for number in range(200))
    typed.press("Explain ", PASTE, text, PASTED, " and ", PASTE, text, PASTED)
    row = ">>> Explain [200 lines pasted] and [200 lines pasted, 2]"
    typed.wait(lambda: typed.lines[-1] == row)
    typed.press("\x7f\x7f" + "then " + PASTE + "short" + PASTED)
    typed.wait(lambda: typed.lines[-1] == ">>> Explain [200 lines pasted] andthen short")
    assert typed.gives("\r") == "message " + ascii(f"Explain {text} andthen short")
    entries = re.split(r"^# .*$", (tmp_path / "history").read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) == 1
    assert entries[0].count("+line ") == 199
    assert typed.gives("[200 lines pasted]\r") == "message '[200 lines pasted]'", "it was typed"


def test_a_long_line_that_is_pasted_is_one_row(chat: Callable[..., Chat]) -> None:
    typed, text = chat(), "word " * 3000
    typed.press(PASTE, text, PASTED, "so?")
    typed.wait(lambda: typed.lines[-1] == ">>> [15,000 characters pasted]so?")
    assert typed.gives("\r") == "message " + ascii(f"{text}so?")


def test_a_paste_while_an_answer_is_written_is_one_message(chat: Callable[..., Chat]) -> None:
    typed = chat()
    typed.press("wait\r")
    typed.wait(lambda: b"waiting" in typed.raw)
    typed.press(PASTE, "/one\rtwo\rthree", PASTED)
    typed.wait(lambda: typed.lines[-1] == "... three")
    assert typed.gives("\r") == "message '/one\\ntwo\\nthree'"
    typed.press(CTRL_D)
    typed.wait(typed.left)
    assert typed.raw.rfind(b"\x1b[?2004l") > typed.raw.rfind(b"\x1b[?2004h"), "the shell gets its terminal back"


def test_a_large_paste_is_quick(chat: Callable[..., Chat]) -> None:
    typed = chat()
    text = "\n".join(f"line {number} of a long file, which goes on a little" for number in range(2000))
    reader = psutil.Process(typed.child.pid).children()[0]
    before = sum(reader.cpu_times()[:2])
    typed.press(PASTE)
    for start in range(0, len(text), 2000):  # a terminal's buffer is small
        typed.press(text[start : start + 2000])
        typed.wait(lambda: True)
    assert typed.gives(PASTED, "\r").endswith("line 1999 of a long file, which goes on a little'")
    assert sum(reader.cpu_times()[:2]) - before < MOST_LOOPS * loop_seconds()


@pytest.mark.parametrize(("columns", "rows"), [(20, 5), (7, 2), (200, 60)])
def test_any_size_of_the_screen(chat: Callable[..., Chat], columns: int, rows: int) -> None:
    typed = chat(columns=columns, rows=rows)
    text = "a rather long line with 日本 and é that no small screen can hold at once"
    assert typed.gives(text, ALT_ENTER, "and one more", "\r") == "message " + ascii(text + "\nand one more")
    assert typed.gives("/he\t\r") == "command '/help'"


def test_a_resize_while_typing(chat: Callable[..., Chat]) -> None:
    typed = chat(columns=60, rows=10)
    typed.type("this is typed before the window")
    for columns, rows in [(20, 5), (100, 30), (33, 7)]:
        typed.resize(columns, rows)
        time.sleep(0.1)
        typed.press("!")
    assert typed.gives("\r") == "message 'this is typed before the window!!!'"
    assert not any(line.count(">>>") > 1 for line in typed.lines)


def test_no_color(chat: Callable[..., Chat]) -> None:
    typed = chat(NO_COLOR="1")
    typed.gives("one\r")
    typed.press(CTRL_R, "on")
    typed.wait(lambda: any("search" in line for line in typed.lines))
    colors = re.findall(rb"\x1b\[([0-9;]*)m", typed.raw)
    assert not [color for color in colors if re.search(rb"(^|;)(3|4|9|10)[0-8](;|$)", color)], colors


def test_no_utf8_locale(chat: Callable[..., Chat]) -> None:
    typed = chat(LC_ALL="C", LANG="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert typed.gives("é 日本 🙂\r") == "message " + ascii("é 日本 🙂")
    typed.raw.decode("ascii")
    typed.press(CTRL_D)
    typed.wait(typed.left)


def test_a_dumb_terminal_gets_no_escapes(chat: Callable[..., Chat]) -> None:
    typed = chat(TERM="dumb")
    assert typed.gives("hello\r") == "message 'hello'"
    assert typed.gives('"""one\r', "two\r", '"""\r') == "message 'one\\ntwo'"
    assert typed.gives("dropped\x15kept\r") == "message 'kept'"  # Ctrl-U, the terminal's own
    typed.press("/edit\r")
    typed.wait(lambda: any("sends this again" in line for line in typed.lines) and typed.at_prompt())
    assert typed.gives("\r") == "message '/once\\nsaid'"
    typed.press("/multiline\r")
    typed.wait(lambda: any("an empty line sends" in line for line in typed.lines) and typed.at_prompt())
    assert typed.gives("one\r", "two\r", "\r") == "message 'one\\ntwo\\n'"
    dropped = itertools.cycle([True, *[False] * 100])

    def said() -> bool:
        if next(dropped):  # again and again: Python misses a Ctrl-C that comes between the prompt and the read
            typed.press(CTRL_C)
        return any("Ctrl-D to leave" in line for line in typed.lines) and typed.at_prompt()

    typed.wait(said)
    typed.press(CTRL_D)
    typed.wait(typed.left)
    assert b"\x1b" not in typed.raw


def test_multiline(chat: Callable[..., Chat]) -> None:
    typed = chat()
    typed.press("/multiline\r")
    typed.wait(lambda: any("Alt-Enter sends" in line for line in typed.lines) and typed.at_prompt())
    assert typed.gives("one\r", "two", ALT_ENTER) == "message 'one\\ntwo'"
    typed.press("/multiline\r")
    typed.wait(lambda: any("Enter sends now" in line for line in typed.lines) and typed.at_prompt())
    assert typed.gives("one", ALT_ENTER, "two\r") == "message 'one\\ntwo'"


def test_a_message_to_be_edited(chat: Callable[..., Chat]) -> None:
    typed = chat()
    typed.press("/edit\r")
    typed.wait(lambda: any(line == "... said" for line in typed.lines))
    assert typed.gives(" again\r") == "message '/once\\nsaid again'", "it was a message, and is no command now"
    assert typed.gives("next\r") == "message 'next'"


def test_ctrl_c_can_be_undone(chat: Callable[..., Chat]) -> None:
    typed = chat()
    typed.type("long thought")
    typed.press(CTRL_C)
    typed.wait(typed.at_prompt)
    typed.press("\x1f")  # Ctrl-_
    typed.wait(lambda: not typed.at_prompt())
    assert typed.gives("\r") == "message 'long thought'"


def test_sigint_is_as_ctrl_c(chat: Callable[..., Chat]) -> None:
    typed = chat()
    (process,) = psutil.Process(typed.child.pid).children()
    process.send_signal(signal.SIGINT)
    typed.wait(lambda: any("Ctrl-D to leave" in line for line in typed.lines) and typed.at_prompt())
    process.send_signal(signal.SIGINT)
    typed.wait(typed.left)


def test_ctrl_z_suspends_and_what_was_typed_is_still_there(chat: Callable[..., Chat], tmp_path: Path) -> None:
    typed = chat()
    typed.type("half a th")
    typed.press(CTRL_Z)
    typed.wait((tmp_path / "suspended").exists)
    typed.wait(lambda: typed.lines[-1] == ">>> half a th" and typed.raw.count(b"\x1b[?2004h") > 1)
    assert b"\x1b[?2004l" in typed.raw
    assert typed.gives("ought\r") == "message 'half a thought'"


def test_search_and_clear(chat: Callable[..., Chat]) -> None:
    typed = chat()
    for message in ("first one", " a secret one", "second"):
        typed.gives(message + "\r")
    typed.press(CTRL_R, "one")
    typed.wait(lambda: any("first one" in line and "search" not in line for line in typed.lines[-2:]))
    typed.press("\r")  # takes what was found
    assert typed.gives("\r") == "message 'first one'"
    typed.press(CTRL_R, "sec", CTRL_C)  # ends the search only
    typed.press(CTRL_L)
    typed.wait(lambda: typed.at_prompt() and typed.lines == [">>>"])


def test_keys_typed_during_a_command_are_in_the_next_prompt_only(chat: Callable[..., Chat], tmp_path: Path) -> None:
    typed = chat()
    typed.press("work\r")
    typed.wait(lambda: "working" in typed.lines)
    typed.press("typed ahead")
    (tmp_path / "continue").touch()
    typed.wait(lambda: typed.lines[-1] == ">>> typed ahead")
    assert typed.lines[-2:] == ["working", ">>> typed ahead"]
    assert typed.gives("\r") == "message 'typed ahead'"


def test_tab(chat: Callable[..., Chat], tmp_path: Path) -> None:
    (tmp_path / "my notes.txt").touch()
    (tmp_path / "my other notes").mkdir()
    (tmp_path / "\x1b[31mred").touch()
    typed = chat()

    def listed(offers: str, written: str) -> bool:
        """They are listed, and the prompt is drawn again: until then the terminal echoes what is typed."""
        return any(offers in line for line in typed.lines[:-1]) and typed.lines[-1].startswith(f">>> {written.strip()}")

    assert typed.gives("/fi\tmy n\t\r") == "command '/file my notes.txt'"
    typed.press("/file my \t")
    typed.wait(lambda: listed("notes.txt     other", "/file my "))
    assert typed.gives("o\t\r") == "command '/file my other notes/'"
    typed.press("/set t\t")
    typed.wait(lambda: listed("temperature  0 to 2", "/set t"))
    typed.press("e\t")
    typed.wait(lambda: "/set temperature" in typed.screen.display[typed.screen.cursor.y])
    typed.press("\t")
    typed.wait(lambda: any(line.strip() == "0 to 2" for line in typed.lines))
    assert typed.gives("\r") == "command '/set temperature'"
    assert b"\x1b[31m" not in typed.raw


def test_tab_lists_more_than_a_screen_without_asking(chat: Callable[..., Chat]) -> None:
    """The pages of prompt_toolkit end with a traceback at Ctrl-C."""
    typed = chat(columns=60, rows=12)
    typed.press("/many \t")
    typed.wait(lambda: any(line.startswith("49  of many") for line in typed.lines) and "/many" in typed.lines[-1])
    assert all(line.endswith("…") for line in typed.lines[:-1])
    typed.press(CTRL_C)
    typed.wait(typed.at_prompt)
    assert typed.gives("said\r") == "message 'said'"
    assert b"Traceback" not in typed.raw
    assert b"y/n" not in typed.raw


# ---- the editor ---------------------------------------------------------------------------------------


def editor(folder: Path, script: str) -> str:
    """An editor that is a shell script."""
    path = folder / "an editor"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return f"'{path}' --wait"


def test_the_editor_gets_what_is_typed_and_gives_it_back(chat: Callable[..., Chat], tmp_path: Path) -> None:
    script = 'ls -l "$2" > seen; echo "$2" >> seen; printf "\\nadded\\n" >> "$2"; cp "$2" "$2~"'
    typed = chat(VISUAL=editor(tmp_path, script), EDITOR="false")
    typed.type("/etc/passwd")
    typed.press(CTRL_C)
    typed.type("typed")
    typed.press(CTRL_G)
    typed.wait(lambda: typed.screen.display[typed.screen.cursor.y].startswith("... added"))
    assert typed.gives("\r") == "message 'typed\\n\\nadded'"
    seen = (tmp_path / "seen").read_text().split()
    assert seen[0].startswith("-rw-------")
    assert seen[-1].endswith(".md")
    assert not Path(seen[-1]).parent.exists()


def test_what_begins_with_a_slash_in_the_editor_is_a_message(chat: Callable[..., Chat], tmp_path: Path) -> None:
    typed = chat(EDITOR=editor(tmp_path, 'printf "/bye\\nx\\n" > "$2"'))
    typed.press(CTRL_G)
    typed.wait(lambda: "... x" in typed.lines)
    assert typed.gives("\r") == "message '/bye\\nx'"
    typed.type("/help")
    typed.press(CTRL_G)
    typed.wait(lambda: "... x" in typed.lines[-1:])
    assert typed.gives("\r") == "command '/bye\\nx'"


@pytest.mark.parametrize(
    ("command", "said"),
    [("false", "status 1"), ("no-such-editor-at-all", "can't be started"), ("'", "not a command line")],
)
def test_an_editor_that_fails_leaves_the_text(chat: Callable[..., Chat], command: str, said: str) -> None:
    typed = chat(EDITOR=command)
    typed.type("typed")
    typed.press(CTRL_G)
    typed.wait(lambda: any(said in line for line in typed.lines))
    assert typed.gives("\r") == "message 'typed'"


def test_ctrl_c_in_the_editor_is_the_editors(chat: Callable[..., Chat], tmp_path: Path) -> None:
    # "up" comes last: a shell that is interrupted while it forks may run its trap in the child too.
    typed = chat(EDITOR=editor(tmp_path, 'trap "echo stopped > \\"$2\\"; exit 0" INT; sleep 20 & touch up; wait'))
    typed.type("typed")
    typed.press(CTRL_G)
    typed.wait((tmp_path / "up").exists)
    typed.press(CTRL_C)
    typed.wait(lambda: any(">>> stopped" in line for line in typed.lines))
    assert typed.gives("\r") == "message 'stopped'"

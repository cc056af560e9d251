"""Messages from typed, pasted and piped input."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from support.streams import Terminal

from llmrun.protocol.codec import without_surrogates
from llmrun.ui.prompt import history as history_module
from llmrun.ui.prompt.drafts import is_open_block, read_typed
from llmrun.ui.prompt.history import MAX_BYTES, MAX_ENTRY_BYTES, SharedHistory, open_history
from llmrun.ui.prompt.input import ChatInput
from llmrun.ui.terminal.output import Output

ENTER, ALT_ENTER, CTRL_C, CTRL_D, TAB, UP = "\r", "\x1b\r", "\x03", "\x04", "\t", "\x1b[A"


def terminal() -> Output:
    return Output(stdin=Terminal(), stdout=Terminal(), stderr=Terminal(), environment={"TERM": "xterm"})


def notes(output: Output) -> str:
    assert isinstance(output.stderr, io.StringIO)
    return output.stderr.getvalue()


@pytest.fixture
def keyboard() -> Iterator[PipeInput]:
    with create_pipe_input() as keyboard:
        yield keyboard


def chat(keyboard: PipeInput, output: Output | None = None, **options: Any) -> ChatInput:
    session_options = {"input": keyboard, "output": DummyOutput()}
    return ChatInput(output or terminal(), session_options=session_options, **options)


def typed(keyboard: PipeInput, *keys: str, **options: Any) -> list[str | None]:
    """All messages that typing these keys gives."""
    keyboard.send_text("".join(keys) + CTRL_D)
    reader = chat(keyboard, **options)
    messages = [reader.read()]
    while messages[-1] is not None:
        messages.append(reader.read())
    return messages


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        ("hello\r", ["hello"]),
        ("\r  \rhello\r", ["hello"]),
        (f"one{ALT_ENTER}two\r", ["one\ntwo"]),
        ("\x1b[200~def f():\r\n\treturn 1\n\x1b[201~ more\r", ["def f():\n\treturn 1\n more"]),
        ('"""one\rtwo\r"""\rthree\r', ["one\ntwo", "three"]),
        ('"""one line"""\r', ["one line"]),
        ('"""x = \'\'\r"""doc"""\r"""\r', ['x = \'\'\n"""doc"""']),
        ('\x1b[200~"""\r/bye\x1b[201~\r', ['"""\n/bye']),
        (f"dropped{CTRL_C}kept\r", ["kept"]),
        ("日本🙂\r", ["日本🙂"]),
    ],
)
def test_typed(keyboard: PipeInput, keys: str, messages: list[str]) -> None:
    assert typed(keyboard, keys) == [*messages, None]


@pytest.mark.parametrize(
    "cluster",
    ["\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "e\u0301", "\u1112\u1161\u11ab", "x"],
)
def test_keys_take_whole_characters(keyboard: PipeInput, cluster: str) -> None:
    back, delete, left, right = "\x7f", "\x1b[3~", "\x1b[D", "\x1b[C"
    assert typed(keyboard, f"a{cluster}{back}b\r") == ["ab", None]
    assert typed(keyboard, f"a{cluster}{left}{delete}b\r") == ["ab", None]
    assert typed(keyboard, f"a{cluster}{left}\x04b\r") == ["ab", None]
    assert typed(keyboard, f"a{cluster}{left}{left}{right}b\r") == [f"ab{cluster}", None]
    assert typed(keyboard, f"{cluster}a{left}{left}{right}b\r") == [f"{cluster}ba", None]


def test_ctrl_c_on_an_empty_line_hints_then_leaves(keyboard: PipeInput) -> None:
    output = terminal()
    keyboard.send_text(CTRL_C)
    keyboard.send_text(CTRL_C + "never read" + ENTER)
    assert chat(keyboard, output).read() is None
    assert notes(output).count("Ctrl-D to leave") == 1


def test_ctrl_c_counts_anew_for_each_message(keyboard: PipeInput) -> None:
    output = terminal()
    reader = chat(keyboard, output)
    keyboard.send_text(CTRL_C + "one" + ENTER)
    assert reader.read() == "one"
    keyboard.send_text(CTRL_C + "two" + ENTER)
    assert reader.read() == "two"
    assert notes(output).count("Ctrl-D to leave") == 2


def test_history_is_kept_for_the_next_chat_and_private(keyboard: PipeInput, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = tmp_path / "state" / "history"
        assert typed(keyboard, "first\rsec", ALT_ENTER, "ond\r", history=path) == ["first", "sec\nond", None]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    finally:
        os.umask(old)
    with create_pipe_input() as again:
        assert typed(again, UP, UP, UP, ENTER, history=path)[0] == "first"


def one(keyboard: PipeInput, reader: ChatInput, keys: str) -> str | None:
    """The message that these keys give, pressed when the prompt is there."""
    keyboard.send_text(keys)
    return reader.read()


def stored(path: Path) -> list[str]:
    """What a new chat finds in a history file, the oldest first."""
    return [*reversed([*open_history(path).load_history_strings()])]


def test_what_history_keeps_out(keyboard: PipeInput, tmp_path: Path) -> None:
    """Secrets, repetitions, and what was dropped; a message of several lines is one entry, whatever is in it."""
    path = tmp_path / "history"
    keys = f"one\rone\r my secret\rdropped{CTRL_C}+two{ALT_ENTER}# x{ALT_ENTER}{ALT_ENTER}+\rone\r"
    typed(keyboard, keys, history=path)
    assert stored(path) == ["one", "+two\n# x\n\n+", "one"]
    with create_pipe_input() as again:
        reader = chat(again)
        assert [one(again, reader, keys) for keys in ("one\r", " my secret\r", UP + ENTER)] == [
            "one",
            " my secret",
            "one",
        ]


def test_a_very_long_entry_is_remembered_in_its_own_chat_only(
    keyboard: PipeInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_ENTRY_BYTES > 100_000
    monkeypatch.setattr(history_module, "MAX_ENTRY_BYTES", 1000)
    path, long = tmp_path / "history", "x" * 1000
    reader = chat(keyboard, history=path)
    assert [one(keyboard, reader, keys) for keys in (f"\x1b[200~{long}\x1b[201~\r", f"{UP}y\r")] == [long, long + "y"]
    assert stored(path) == []
    assert stored(path) == []
    SharedHistory(path).append_string("é\udcff" * 100)
    assert stored(path) == ["é?" * 100]


def test_chats_at_the_same_time_append_whole_entries(tmp_path: Path, package_on_path: None) -> None:
    path = tmp_path / "history"
    script = (
        "import sys\nfrom pathlib import Path\nfrom llmrun.ui.prompt.history import open_history\n"
        "history = open_history(Path(sys.argv[1]))\n"
        "for number in range(100): history.append_string('\\n'.join([sys.argv[2] * 100] * 100))"
    )
    chats = [subprocess.Popen([sys.executable, "-c", script, str(path), letter]) for letter in "abc"]
    assert [chat.wait() for chat in chats] == [0, 0, 0]
    entries = open_history(path).load_history_strings()
    assert sorted(entries)[::100] == ["\n".join([letter * 100] * 100) for letter in "abc"]


def test_a_history_that_has_grown_long_keeps_its_newest_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_BYTES", 2000)
    path = tmp_path / "history"
    history = open_history(path)
    for number in range(100):
        history.append_string(f"entry {number}")
    assert len(stored(path)) < 30
    assert stored(path)[-1] == "entry 99"
    assert all(entry.startswith("entry ") for entry in stored(path))
    assert path.stat().st_size < 1100
    assert MAX_BYTES > 1_000_000


def test_a_full_disk_loses_the_entry_and_nothing_else(tmp_path: Path) -> None:
    history = SharedHistory(tmp_path / "gone" / "history")
    history.append_string("one")
    assert history.get_strings() == ["one"]


def test_unwritable_history_is_no_reason_not_to_chat(keyboard: PipeInput, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert typed(keyboard, "hello\r", history=tmp_path / "file" / "history") == ["hello", None]


@pytest.mark.parametrize(
    ("keys", "message", "command"),
    [
        ("/help\r", "/help", True),
        ("  /help\r", "/help", True),
        ('/system """one\rtwo"""\r', "/system one\ntwo", True),
        (f"/system one{ALT_ENTER}two\r", "/system one\ntwo", True),
        ('"""/help"""\r', "/help", False),
        ("\x1b[200~/help\x1b[201~\r", "/help", True),
        ("\x1b[200~/help\rx\x1b[201~\r", "/help\nx", False),
        ("\x1b[200~/usr/bin:\r/usr/sbin\x1b[201~\r", "/usr/bin:\n/usr/sbin", False),
        ("\x1b[200~//cdn.example.com/x\x1b[201~\r", "//cdn.example.com/x", False),
        ("//usr/bin is what?\r", "/usr/bin is what?", False),
        (" //help\r", "/help", False),
        (f"//one{ALT_ENTER}/two\r", "/one\n/two", False),
        ("what is /help\r", "what is /help", False),
        ("exit\r", "exit", True),
        (" quit() \r", "quit()", True),
        ('"""exit"""\r', "exit", False),
        ("exit codes?\r", "exit codes?", False),
    ],
)
def test_commands(keyboard: PipeInput, keys: str, message: str, command: bool) -> None:
    keyboard.send_text(keys + "next\r")
    reader = chat(keyboard)
    assert (reader.read(), reader.is_command) == (message, command)
    assert (reader.read(), reader.is_command) == ("next", False)


def test_each_piped_line_is_a_message(tmp_path: Path) -> None:
    stdin = io.StringIO('one\n\n  \n"""two\r\n/three\n//four\nexit')
    stdout, history = io.StringIO(), tmp_path / "history"
    with ChatInput(Output(stdin=stdin, stdout=stdout, stderr=io.StringIO()), history) as reader:
        assert not reader.interactive
        assert [reader.read() for _ in range(6)] == ["one", '"""two', "/three", "//four", "exit", None]
        assert not reader.is_command
    assert stdout.getvalue() == ""
    assert not history.exists()


def test_piped_bytes_that_are_no_text() -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"a\xffb\nnext\n"), encoding="utf-8")
    reader = ChatInput(Output(stdin=stdin, stdout=io.StringIO(), stderr=io.StringIO()))
    assert reader.read() == "a\ufffdb"
    assert reader.read() == "next"


@pytest.mark.parametrize(
    ("text", "is_open"),
    [('"""', True), (' """a\nb', True), ('"""a"""', False), ('a """', False), ("", False), ('""', False),
     ('"""a"""b"""', True), ('/set """', True), ('/set """a"""', False), ('//set """', False)],
)  # fmt: skip
def test_is_open_block(text: str, is_open: bool) -> None:
    assert is_open_block(text) is is_open


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"""\na\n  b\n"""', "a\n  b"),
        ('"""a""" and more', "a and more"),
        ('"""a', "a"),
        (' say """a""" ', ' say """a""" '),
        ('"""a """doc""" b"""', 'a """doc""" b'),
        ('/set """\na\n""" ', "/set a"),
        (" /set a ", "/set a"),
        ('""""quoted""""', '"quoted"'),
        ('"""//a"""', "//a"),
        ("//set a", "/set a"),
        ("///a", "//a"),
        ("// a comment", "// a comment"),
        ("//", "//"),
        ("see //a", "see //a"),
    ],
)
def test_read_typed(text: str, message: str) -> None:
    assert read_typed(text) == message


def test_without_surrogates() -> None:
    assert without_surrogates("a\udcff\ud83d🙂") == "a\ufffd\ufffd🙂"


CHAT = """
import subprocess, sys
from llmrun.ui.prompt.input import ChatInput
from llmrun.ui.terminal.output import Output
with ChatInput(Output(), commands=["/help", "/set"]) as reader:
    while (message := reader.read()) is not None:
        if message == "break":
            subprocess.run(["stty", "raw", "-echo"])
            break
        print("got", ascii(message), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
@pytest.mark.parametrize("leave", [CTRL_D, CTRL_C + CTRL_C, "break\r"])
def test_on_a_real_terminal_which_is_as_before_afterwards(leave: str) -> None:
    import termios

    child = pexpect.spawn(
        sys.executable, ["-c", CHAT], encoding="utf-8", timeout=120, env={**os.environ, "TERM": "xterm"}
    )
    before = termios.tcgetattr(child.child_fd)
    child.expect(">>>")
    child.send("\x1b[200~a\nb\x1b[201~\r")
    child.expect_exact("got 'a\\nb'")
    child.expect(">>>")
    child.send(f"/he{TAB}")
    child.expect("lp")
    child.send(ENTER)
    child.expect("got '/help'")
    child.expect(">>>")
    child.send(leave)
    child.expect(pexpect.EOF)
    assert "CPR" not in child.before
    assert termios.tcgetattr(child.child_fd) == before
    child.close()
    assert child.exitstatus == 0

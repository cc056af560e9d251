"""Notes across chats: off unless they are switched on, written by /remember alone, and cut to a stated size."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from llmrun.chat.notes import MOST_CHARACTERS, describe_notes, notes_file, read_notes, remember, system_messages
from llmrun.errors import ResourceError, UsageError
from llmrun.protocol.messages import Message


@pytest.fixture
def notes(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, which does not exist yet; notes are on."""
    monkeypatch.setenv("LLMRUN_NOTES", "on")
    return home / "notes.md"


def test_they_are_off_unless_the_setting_is_on(home: Path, tmp_path: Path) -> None:
    notes_file().write_text("- I live in Oslo\n")
    assert (read_notes(), describe_notes(), system_messages("Be brief.")) == ("", "", [Message("system", "Be brief.")])
    assert system_messages("") == []
    with pytest.raises(UsageError, match="are off") as off:
        remember("more")
    assert off.value.hint == "llmrun config set notes on"
    assert notes_file().read_text() == "- I live in Oslo\n"
    (tmp_path / "config.toml").write_text("notes = true\n")
    assert read_notes() == "- I live in Oslo"
    assert notes_file().parent == home


def test_what_is_remembered_is_part_of_the_system_prompt(notes: Path) -> None:
    assert (system_messages(""), describe_notes()) == ([], ""), "there is no file yet"
    remember("I live in Oslo.")
    notes.write_text(f"# Mine\n\n{notes.read_text()}")
    remember("Answer in metres.")
    assert notes.read_text() == "# Mine\n\n- I live in Oslo.\n- Answer in metres.\n", "what the user wrote stays"
    (message,) = system_messages("Be brief.")
    assert message.content.startswith("Be brief.\n\n")
    assert message.content.endswith(f":\n{notes.read_text().strip()}")
    assert system_messages("")[0].content == message.content.removeprefix("Be brief.\n\n")
    assert f"{len(notes.read_text().strip())} characters of {notes}" in describe_notes()


def test_the_last_lines_of_long_notes_are_used(notes: Path) -> None:
    lines = [f"- note {number}" for number in range(1000)]
    notes.write_text("\n".join(lines))
    (message,) = system_messages("")
    used = message.content.partition("\n")[2]
    assert used.splitlines() == lines[-len(used.splitlines()) :], "whole lines"
    assert MOST_CHARACTERS - len(lines[-1]) <= len(used) <= MOST_CHARACTERS
    assert f"the last {len(used):,} of {len(notes.read_text()):,} characters" in describe_notes()
    notes.write_text("x" * 2 * MOST_CHARACTERS)
    assert len(system_messages("")[0].content.partition("\n")[2]) == MOST_CHARACTERS


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in place of the file is another error there")
def test_notes_that_cannot_be_read_are_said(notes: Path) -> None:
    notes.mkdir()
    with pytest.raises(ResourceError, match="can't be read") as refused:
        system_messages("")
    assert refused.value.hint == "llmrun config set notes off"
    notes.rmdir()
    notes.write_bytes(b"caf\xe9")
    assert read_notes() == "caf\N{REPLACEMENT CHARACTER}"
    remember("one line\nand another")
    assert notes.read_bytes() == b"caf\xe9\n- one line\n  and another\n"


@pytest.mark.skipif(sys.platform == "win32", reason="rights are others there")
def test_only_their_owner_can_read_them(notes: Path) -> None:
    remember("secret")
    assert not stat.S_IMODE(notes.stat().st_mode) & 0o077

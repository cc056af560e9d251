"""Pastes that a terminal does not mark, and pastes whose end is lost."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import pytest
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

from llmrun.ui.prompt.prompt import PasteMarker, open_keyboard

LONG = "a long text, typed by nobody, with ünïcödé and a few more words in it"
BEGIN, END = "\x1b[200~", "\x1b[201~"


def keys(*reads: str) -> list[KeyPress]:
    """Return the keys of what a terminal sends in several reads."""
    pressed: list[KeyPress] = []
    parser, marker = Vt100Parser(pressed.append), PasteMarker()
    for read in reads:
        parser.feed(marker.mark(read))
    return pressed


def test_much_text_at_once_is_a_paste() -> None:
    assert keys(LONG) == [KeyPress(Keys.BracketedPaste, LONG)]
    assert keys(f"{LONG}\r{LONG}") == [
        KeyPress(Keys.BracketedPaste, LONG),
        KeyPress(Keys.ControlM, "\r"),
        KeyPress(Keys.BracketedPaste, LONG),
    ], "each line is sent, as when typed"
    assert keys("short") == [KeyPress(letter, letter) for letter in "short"]


@pytest.mark.parametrize("cut", range(len(BEGIN + LONG + END) + 1))
def test_a_marked_paste_stays_one_however_it_is_cut(cut: int) -> None:
    paste = BEGIN + LONG + END
    first, *others = keys(paste[:cut], paste[cut:], "x")
    assert first == KeyPress(Keys.BracketedPaste, LONG)
    assert others == [KeyPress("x", "x")]


@pytest.mark.parametrize("interrupt", ["\x03", "\x04"])
def test_a_paste_without_an_end_does_not_swallow_interrupts(interrupt: str) -> None:
    paste, key = keys(BEGIN + "hello", interrupt)
    assert paste == KeyPress(Keys.BracketedPaste, "hello")
    assert key.data == interrupt
    assert keys(BEGIN, "a", interrupt, "b")[-1] == KeyPress("b", "b")


def test_interrupts_inside_a_paste_are_text() -> None:
    assert keys(f"{BEGIN}a\x03b{END}") == [KeyPress(Keys.BracketedPaste, "a\x03b")]


def test_random_reads_give_the_same_text() -> None:
    chance = random.Random(1)
    for _ in range(200):
        parts = [chance.choice((LONG, "ab", f"{BEGIN}p{LONG}\n{END}", "\r")) for _ in range(6)]
        whole, reads = "".join(parts), []
        while whole:
            length = chance.randrange(1, 90)
            reads.append(whole[:length])
            whole = whole[length:]
        text = "".join(key.data for key in keys(*reads))
        assert text == "".join(parts).replace(BEGIN, "").replace(END, "")


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a pseudo-terminal."""
    ends = os.openpty()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_terminal_is_read(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    with os.fdopen(os.dup(theirs), encoding="utf-8") as stdin:
        keyboard = open_keyboard(stdin)
        with keyboard.raw_mode():
            os.write(ours, LONG.encode())
            assert keyboard.read_keys() == [KeyPress(Keys.BracketedPaste, LONG)]

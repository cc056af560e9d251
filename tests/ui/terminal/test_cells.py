"""Cells and columns, against wcwidth and by hand."""

from __future__ import annotations

import pytest
from support.screens import ReflowingScreen, Terminal
from wcwidth import wcwidth

from llmrun.ui.terminal.cells import (
    advance,
    char_width,
    cut,
    last_cluster,
    may_grow,
    shrunk,
    width,
    wrapped,
    wrapped_by_blanks,
)


def test_cells() -> None:
    for char in "aé日🙂\u0301\ufe0fカ한\u1161":
        assert char_width(char) == max(wcwidth(char), 0)
    assert width("a日") == 3
    assert cut("a日本", 4) == "a日"
    assert cut("abc", 2) == "ab"
    assert [last_cluster(text) for text in ("ab", "e\u0301", "a日\t", "a👩\u200d👧", "a👍🏽", "a🇫🇷", "")] == [
        1, 0, 1, 1, 1, 1, 0,
    ]  # fmt: skip
    assert [may_grow(text) for text in ("a", "é", "日", "🙂", "❤\ufe0f", "🙂 ", "")] == [
        False, False, False, True, True, False, False,
    ]  # fmt: skip
    assert advance(0, "x" * 20, 20) == 20
    assert advance(20, "y", 20) == 1
    assert advance(19, "日", 20) == 2
    assert advance(5, "a\nbc", 20) == 2
    assert advance(3, "\t", 20) == 8
    assert advance(17, "\t", 20) == 19
    assert advance(20, "\t", 20) == 20


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("one two three", ["one two", "three"]),
        ("  /go [NAME]  one two three", ["  /go [NAME]  one two three"]),
        ("  -f  1 2 3 4 5 6", ["  -f  1 2 3", "      4 5 6"]),
        ("日本語 日本語", ["日本語", "日本語"]),
        ("x" * 30, ["x" * 30]),
        ("", [""]),
    ],
)
def test_lines_are_wrapped_between_words_below_their_last_column(line: str, rows: list[str]) -> None:
    assert wrapped(line, 40 if "/go" in line else 12) == rows


def test_columns_give_what_they_can_and_no_more() -> None:
    assert shrunk([10, 30, 5], [10, 6, 5], 30) == [10, 15, 5]
    assert shrunk([10, 30], [10, 6], 12) == [10, 6]


@pytest.mark.parametrize("columns", [*range(22, 82), 200])
def test_a_line_to_be_copied_has_whole_words_and_stays_one_line(columns: int) -> None:
    text = "  try: llmrun run qwen3-coder-30b 'two  words' 日本語日本語日 or it isn't what can't be"
    terminal = Terminal(columns, 24, kind=ReflowingScreen)
    terminal.write(wrapped_by_blanks(text, columns) + "\n")
    rows = terminal.screen.everything()
    for word in ("qwen3-coder-30b", "'two  words'", "日本語日本語日", "isn't", "can't"):
        assert sum(word in row for row in rows) == 1, word
    assert isinstance(terminal.screen, ReflowingScreen)
    assert "\n" not in terminal.screen.copied()
    assert terminal.screen.copied().split() == text.split()


def test_a_word_longer_than_a_row_is_left_to_the_terminal() -> None:
    path = "/" + "x" * 50
    assert wrapped_by_blanks(f"try: {path} again", 20) == f"try:{' ' * 16}{path}{' ' * 9}again"

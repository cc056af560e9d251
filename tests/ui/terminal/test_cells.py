"""Cells and columns, against wcwidth and by hand."""

from __future__ import annotations

import pytest
from wcwidth import wcwidth

from llmrun.ui.terminal.cells import advance, char_width, cut, last_cluster, may_grow, shrunk, width, wrapped


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

"""Widths of text in terminal cells, and cursor columns. Pure.

Terminals disagree on some emoji and combining marks, so a column computed here is a good guess: to move the cursor, let
the terminal save the place (see ui/answer/view.py).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

TAB = 8
JOINER = "\u200d"
SKIN_TONES = "".join(map(chr, range(0x1F3FB, 0x1F400)))
FLAG_LETTERS = "".join(map(chr, range(0x1F1E6, 0x1F200)))


@lru_cache(maxsize=4096)
def char_width(char: str) -> int:
    """Return the cells of one printable character: 0 for combining ones, 2 for wide ones (CJK, emoji)."""
    if unicodedata.category(char) in {"Mn", "Me", "Cf"} or 0x1160 <= ord(char) <= 0x11FF:
        return 0  # Korean vowels and finals, drawn into the syllable before them
    return 2 if unicodedata.east_asian_width(char) in {"W", "F"} else 1


def width(text: str) -> int:
    """Return the cells of a text without tabs and newlines."""
    return len(text) if text.isascii() else sum(map(char_width, text))


def cut(text: str, cells: int) -> str:
    """Return the longest beginning of the text that fits."""
    if text.isascii():
        return text[: max(cells, 0)]
    used = 0
    for index, char in enumerate(text):
        used += char_width(char)
        if used > cells:
            return text[:index]
    return text


def fitting(text: str, cells: int) -> str:
    """Return the text, or as much of its beginning as fits before an ellipsis."""
    return text if width(text) <= cells else cut(text, cells - 1).rstrip() + "…"


def wrapped(text: str, cells: int) -> list[str]:
    """Return a line in rows, broken between words; a word that is too long is left to the terminal.

    Rows after the first are indented to the line's last column, which two or more blanks precede.
    """
    gaps = [match.end() for match in re.finditer(r"(?:\A|(?<=\S))  +(?=\S)", text)]
    indent = max((gap for gap in gaps if gap <= cells // 2), default=0)
    rows, row, is_new = [], text[:indent], True
    for word in text[indent:].split(" "):
        if not is_new and width(row) + 1 + width(word) > cells:
            rows.append(row)
            row, is_new = " " * indent, True
        row, is_new = row + word if is_new else f"{row} {word}", False
    return [*rows, row]


_QUOTED = re.compile(r"""(?<!\S)(['"]).*?\1(?!\S)""")
UNBROKEN = "\xa0"  # no-break space


def wrapped_by_blanks(text: str, cells: int) -> str:
    """Return a line that a copy has as one: blanks fill its rows, so that the terminal wraps it between words.

    What stands in quotes is a word.
    """
    rows = wrapped(_QUOTED.sub(lambda quoted: quoted[0].replace(" ", UNBROKEN), text), cells - 1)
    filled = [row + " " * (-width(row) % cells or cells) for row in rows[:-1]]  # at least one, for the copy
    return "".join((*filled, rows[-1])).replace(UNBROKEN, " ")


def shrunk(widths: Sequence[int], minimum: Sequence[int], room: int) -> list[int]:
    """Return widths of columns that fit into the room, or the minimum: the columns with most to spare shrink first."""
    shrunk_widths = list(widths)
    while sum(shrunk_widths) > room and shrunk_widths != list(minimum):
        shrunk_widths[max(range(len(shrunk_widths)), key=lambda index: shrunk_widths[index] - minimum[index])] -= 1
    return shrunk_widths


def last_cluster(text: str) -> int:
    """Return the start of the last visible character, including its marks, tabs, or the rest of an emoji."""
    start = len(text)
    while start > 0:
        start -= 1
        char, before = text[start], text[start - 1 : start]
        joined = before == JOINER or char in SKIN_TONES or (char in FLAG_LETTERS and before in FLAG_LETTERS)
        if char != "\t" and char_width(char) and not (before and joined):
            break
    return start


def may_grow(text: str) -> bool:
    """Return whether the next character could combine with the last: emoji are built from several."""
    return not text.isascii() and unicodedata.category(text[last_cluster(text)]) == "So"


def advance(column: int, text: str, columns: int) -> int:
    """Return the cursor's column after printing text from a column on, with the terminal's wrapping.

    Args:
        column: cells left of the cursor, 0 to columns. `columns` is the state in which the last cell of a row is taken,
            and the cursor wraps only when the next character comes.
        text: sanitized text, with newlines and tabs.
        columns: of the terminal, at minimum 2.
    """
    if "\n" in text:
        column, text = 0, text[text.rindex("\n") + 1 :]
    if text.isascii() and "\t" not in text:
        return (column + len(text) - 1) % columns + 1 if text else column
    for char in text:
        if char == "\t":
            # A tab never wraps, and changes nothing when the row is full.
            column = column if column >= columns else min(column - column % TAB + TAB, columns - 1)
            continue
        cells = char_width(char)
        column = cells if cells and column + cells > columns else column + cells
    return column


DIM = "2"

_SGR = re.compile(r"\x1b\[[0-9;]*m")


def paint(text: str, style: str) -> str:
    """Return the text in a style such as "1;3", followed by a reset."""
    return f"\x1b[{style}m{text}\x1b[0m" if style and text else text


def bare(text: str) -> str:
    """Return painted text without its styles."""
    return _SGR.sub("", text) if "\x1b" in text else text

"""Tables of Markdown as rows of text: aligned columns where they fit, one record after the other where they don't.

Owns the layout; must not know streams or the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmrun.ui.answer.inline import inline
from llmrun.ui.terminal.ansi import BOLD, DIM, Span
from llmrun.ui.terminal.cells import char_width, width

_MIN_COLUMN = 8  # cells; a table that would need narrower columns is shown as records

_BAR = re.compile(r"(?<!\\)\|")
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")


@dataclass(frozen=True, slots=True)
class Grid:
    """A table whose layout is settled.

    Attributes:
        headings: text of each column's heading.
        right: whether the column's cells end on its right.
        widths: cells of each column; empty when the rows are shown as records.
        styled: whether marks of Markdown become styles; otherwise they stay.
        line: the character of the line below the headings.
    """

    headings: tuple[str, ...]
    right: tuple[bool, ...]
    widths: tuple[int, ...]
    styled: bool
    line: str

    def head(self) -> list[list[Span]]:
        """The rows above the first row of cells."""
        if not self.widths:
            return []
        lines = [[(self.line * cells, DIM)] for cells in self.widths]
        return [*self._rows([cell_spans(text, self.styled, BOLD) for text in self.headings]), _beside(lines)]

    def rows(self, line: str) -> list[list[Span]]:
        """A line of the table's source, as it is shown."""
        cells = _cells_of(line, len(self.headings))
        if self.widths:
            return self._rows([cell_spans(text, self.styled) for text in cells])
        record = []
        for heading, text in zip(self.headings, cells, strict=True):
            if text:
                name = [*cell_spans(heading, self.styled, BOLD), (": ", "")] if heading else []
                record.append([*name, *cell_spans(text, self.styled)])
        return [*record, [(self.line * 3, DIM)]]

    def _rows(self, cells: Sequence[Sequence[Span]]) -> list[list[Span]]:
        columns = [
            [_aligned(row, room, right=right) for row in _wrapped(spans, room)]
            for spans, room, right in zip(cells, self.widths, self.right, strict=True)
        ]
        height = max(1, *(len(rows) for rows in columns))
        blank = [[(" " * room, "")] for room in self.widths]
        return [
            _beside([rows[index] if index < len(rows) else empty for rows, empty in zip(columns, blank, strict=True)])
            for index in range(height)
        ]


def lay_out(lines: Sequence[str], columns: int, *, styled: bool, line: str) -> Grid:
    """Settle a table's layout.

    Args:
        lines: of its source: the headings, the delimiters, and as many rows as have come.
        columns: cells that a row may take.
    """
    headings = split_row(lines[0])
    marks = [*split_row(lines[1]), *headings]
    right = tuple(re.fullmatch("-+:", mark) is not None for mark in marks[: len(headings)])
    wanted = [1] * len(headings)
    for source in (lines[0], *lines[2:]):
        for index, text in enumerate(_cells_of(source, len(headings))):
            wanted[index] = max(wanted[index], _width(cell_spans(text, styled)))
    return Grid(tuple(headings), right, _fitted(wanted, columns - 2 * (len(wanted) - 1)), styled, line)


def split_row(line: str) -> list[str]:
    """The cells of a row; a bar in code or after a backslash is text."""
    hidden = _CODE.sub(lambda match: match[0].replace("|", "\0"), line.strip())
    cells = _BAR.split(hidden.removeprefix("|"))
    if len(cells) > 1 and not cells[-1].strip():
        cells.pop()
    return [cell.strip().replace("\0", "|").replace("\\|", "|") for cell in cells]


def _cells_of(line: str, n_columns: int) -> list[str]:
    """As many cells as there are columns; what has no column of its own is not lost."""
    cells = split_row(line)
    cells += [""] * (n_columns - len(cells))
    return [*cells[: n_columns - 1], " | ".join(cells[n_columns - 1 :])]


def cell_spans(text: str, styled: bool, style: str = "") -> list[Span]:
    """A cell's text with its styles."""
    return inline(text, style) if styled else [(text, "")]


def _fitted(wanted: Sequence[int], room: int) -> tuple[int, ...]:
    """Widths of the columns: narrow ones keep what they want, the others share the rest; () when that is too little."""
    if sum(wanted) <= room:
        return tuple(wanted)
    widths, left = [0] * len(wanted), room
    by_width = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for n_done, index in enumerate(by_width):
        widths[index] = min(wanted[index], left // (len(wanted) - n_done))
        if widths[index] < min(wanted[index], _MIN_COLUMN):
            return ()
        left -= widths[index]
    return tuple(widths)


def _wrapped(spans: Sequence[Span], room: int) -> list[list[Span]]:
    """A cell's rows, broken at spaces, and inside a word that is wider than the column."""
    left = [(char, style) for text, style in spans for char in text]
    rows = []
    while left:
        used = end = space = 0
        while end < len(left) and used + char_width(left[end][0]) <= room:
            used += char_width(left[end][0])
            end += 1
            if left[end - 1][0] == " ":
                space = end
        if end < len(left) and left[end][0] != " ":
            end = space or max(end, 1)
        rows.append(_trimmed(left[:end]))
        left = left[end:]
        while left and left[0][0] == " ":
            del left[0]
    return rows


def _trimmed(row: list[Span]) -> list[Span]:
    while row and row[-1][0] == " ":
        row.pop()
    return row


def _width(spans: Sequence[Span]) -> int:
    return sum(width(text) for text, _ in spans)


def _aligned(row: list[Span], room: int, *, right: bool) -> list[Span]:
    padding = (" " * (room - _width(row)), "")
    return [padding, *row] if right else [*row, padding]


def _beside(cells: Sequence[list[Span]]) -> list[Span]:
    row: list[Span] = []
    for index, cell in enumerate(cells):
        row += [("  ", ""), *cell] if index else cell
    return row

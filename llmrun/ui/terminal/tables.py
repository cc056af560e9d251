"""Tables and lists of facts: aligned text that fits the terminal.

Every cell is untrusted text: it is sanitized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmrun.ui.terminal.cells import UNBROKEN, fitting, shrunk, width, wrapped, wrapped_by_blanks
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, and the style of its cells. An excerpt is the beginning of a text, and may be cut anywhere."""

    heading: str
    right: bool = False
    style: str = ""
    is_excerpt: bool = False
    is_dispensable: bool = False  # left out where the other columns fit without it, and not with it


def right(*headings: str) -> list[Column]:
    """Return right-aligned columns, as figures have."""
    return [Column(heading, right=True) for heading in headings]


def show_facts(output: Output, facts: Sequence[tuple[str, object]], *, stderr: bool = False) -> None:
    """Print names and values, one pair a line. Whole numbers get thousands separators; stderr as in show_table()."""
    rows = [(name, _value(value)) for name, value in facts]
    show_table(output, (Column("", style="dim"), Column("")), rows, stderr=stderr)


_GAP = 2  # cells between columns
_MIN_TEXT, _MIN_EXCERPT = 20, 12  # cells
_MAX_CELL_ROWS = 3
_CODES = {
    "bold": "\x1b[1m",
    "dim": "\x1b[2m",
    "green": "\x1b[32m",
    "yellow": "\x1b[33m",
    "bold red": "\x1b[1;31m",
    "cyan": "\x1b[36m",
}
_STATE_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "damaged": "bold red", "unknown": "yellow"}


def show_table(
    output: Output, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, stderr: bool = False
) -> None:
    """Print a table on stdout. Headings are left out when all are empty.

    On a terminal, a column with nothing but a heading is left out. On a narrow one, cells are wrapped between words,
    and excerpts cut; if that is not enough, each row becomes a record of several lines.

    Args:
        columns: one for each cell of a row.
        rows: untrusted text; newlines become spaces.
        stderr: print there, because the table is not the command's result.
    """
    safe = [[clean(cell) for cell in row] for row in rows]
    cells = output.columns(stderr=stderr)
    if cells and safe:
        columns, safe = _without_dispensable(*_without_empty(columns, safe), cells)
    headings = [column.heading for column in columns]
    heads = [headings] if any(headings) else []
    widths = [max((width(line[index]) for line in heads + safe), default=0) for index in range(len(columns))]
    printer = _Printer(output, stderr=stderr)
    if not cells or sum(widths) + _GAP * (len(widths) - 1) <= cells:
        printer.table(columns, heads, safe, widths)
    elif not heads:
        printer.facts(columns, safe, widths, cells)
    elif found := _fitted(columns, heads + safe, widths, cells - _GAP * (len(widths) - 1)):
        printer.table(columns, heads, safe, found)
    else:
        for row in safe:
            printer.record(columns, row, cells)
    printer.stream.flush()


def show_record(output: Output, columns: Sequence[Column], row: Sequence[str]) -> None:
    """Print one row of a table that is too wide for the terminal."""
    _Printer(output, stderr=False).record(columns, [clean(cell) for cell in row], output.columns())
    output.stdout.flush()


def _without_empty(columns: Sequence[Column], rows: list[list[str]]) -> tuple[Sequence[Column], list[list[str]]]:
    """Return the columns and cells to show, without columns that have a heading and no text in any row."""
    shown = [index for index, column in enumerate(columns) if not column.heading or any(row[index] for row in rows)]
    return [columns[index] for index in shown], [[row[index] for index in shown] for row in rows]


def _without_dispensable(
    columns: Sequence[Column], rows: list[list[str]], room: int
) -> tuple[Sequence[Column], list[list[str]]]:
    """Return the columns and cells to show: without the last dispensable ones, if what is left then fits unbroken."""
    lines = [[column.heading for column in columns], *rows]
    limits = [_MIN_EXCERPT if column.is_excerpt else room for column in columns]
    widths = [min(max(width(line[index]) for line in lines), limit) + _GAP for index, limit in enumerate(limits)]
    shown = list(range(len(columns)))
    dispensable = [index for index, column in enumerate(columns) if column.is_dispensable]
    while dispensable and sum(widths[index] for index in shown) > room + _GAP:
        shown.remove(dispensable.pop())
    if sum(widths[index] for index in shown) > room + _GAP:
        return columns, rows
    return [columns[index] for index in shown], [[row[index] for index in shown] for row in rows]


def _fitted(
    columns: Sequence[Column], lines: Sequence[Sequence[str]], widths: Sequence[int], room: int
) -> list[int] | None:
    """Return widths that fit into the room without a broken word or a high cell; None if there are none."""
    minimum = [_min_width([line[index] for line in lines], column) for index, column in enumerate(columns)]
    if sum(minimum) > room:
        return None
    excerpts_first = [
        small if column.is_excerpt else cells for small, cells, column in zip(minimum, widths, columns, strict=True)
    ]
    found = shrunk(shrunk(widths, excerpts_first, room), minimum, room)
    heights = (
        len(wrapped(cell, cells))
        for line in lines
        for cell, cells, column in zip(line, found, columns, strict=True)
        if not column.is_excerpt
    )
    return found if max(heights, default=0) <= _MAX_CELL_ROWS else None


def _min_width(cells: Sequence[str], column: Column) -> int:
    """Return the minimum width of a column: no name, number or word is split."""
    if column.is_excerpt:
        return min(max(map(width, cells)), _MIN_EXCERPT)
    is_whole = column.right or column.style == "bold"
    parts = (part for cell in cells for part in ([cell] if is_whole else cell.split()))
    return max(map(width, parts), default=0)


def _named(cell: str, column: Column) -> str:
    """Return a cell with its heading, unless the cell is clear without."""
    heading = " ".join(word if word in ("MB", "GB") else word.lower() for word in column.heading.split())
    is_named = column.right or cell == "no"
    return heading if cell == "yes" else f"{heading} {cell}".strip() if is_named else cell


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


class _Printer:
    """A writer of rows, without Rich, whose import takes longer than most commands."""

    def __init__(self, output: Output, *, stderr: bool) -> None:
        self.stream = output.stderr if stderr else output.stdout
        self._color = output.stderr_has_color if stderr else output.stdout_has_color

    def table(
        self,
        columns: Sequence[Column],
        heads: Sequence[Sequence[str]],
        rows: Sequence[Sequence[str]],
        widths: Sequence[int],
    ) -> None:
        """Write aligned columns."""
        for line in heads:
            self._row(columns, line, widths, ["dim"] * len(columns))
        for line in rows:
            self._row(columns, line, widths, [_style(*each) for each in zip(line, columns, strict=True)])

    def _row(
        self, columns: Sequence[Column], line: Sequence[str], widths: Sequence[int], styles: Sequence[str]
    ) -> None:
        parts = [
            [fitting(cell, cells)] if column.is_excerpt else wrapped(cell, cells)
            for cell, column, cells in zip(line, columns, widths, strict=True)
        ]
        for number in range(max(map(len, parts))):
            shown = []
            for part, column, cells, style in zip(parts, columns, widths, styles, strict=True):
                text = part[number] if number < len(part) else ""
                padding = " " * (cells - width(text))
                shown.append(padding + self._paint(text, style) if column.right else self._paint(text, style) + padding)
            self.stream.write((" " * _GAP).join(shown).rstrip() + "\n")

    def facts(self, columns: Sequence[Column], rows: list[list[str]], widths: list[int], cells: int) -> None:
        """Write names, each with a text beside it, or below it where a word is too long for that."""
        room = cells - sum(widths[:-1]) - _GAP * (len(widths) - 1)
        stands_beside = room >= min(widths[-1], _MIN_TEXT)
        for *names, text in rows:
            if not any(names) and width(text) > room:  # a command, to be copied as one line
                self.stream.write(wrapped_by_blanks(f"  {text}", cells) + "\n")
            elif stands_beside and max(map(width, text.split()), default=0) <= room:
                self.table(columns, [], [[*names, text]], [*widths[:-1], room])
            else:
                if any(names):
                    self.table(columns[:-1], [], [names], widths[:-1])
                for line in wrapped("  " + text, cells):
                    self.stream.write(line.rstrip() + "\n")

    def record(self, columns: Sequence[Column], row: Sequence[str], cells: int) -> None:
        """Write a row's first cell, the others below it, and excerpts in lines of their own."""
        first, *rest = zip(row, columns, strict=True)
        self.stream.write(self._paint(_named(*first), _style(*first)).rstrip() + "\n")
        named = [_named(cell, column) for cell, column in rest if cell and not column.is_excerpt]
        whole = [text.replace(" ", UNBROKEN) if width(text) < cells - 4 else text for text in named]
        lines = [", ".join(whole), *(cell for cell, column in rest if column.is_excerpt)]
        for line in filter(None, lines):
            for part in wrapped("  " + line, cells):
                self.stream.write(part.replace(UNBROKEN, " ") + "\n")

    def _paint(self, text: str, style: str) -> str:
        return f"{_CODES[style]}{text}\x1b[0m" if self._color and text and style else text


def _style(cell: str, column: Column) -> str:
    return _STATE_STYLES.get(cell, column.style)

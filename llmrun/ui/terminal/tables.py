"""Tables and lists of facts: aligned text that fits the terminal.

Every cell is untrusted text: it is sanitized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.cells import fitting, shrunk, width, wrapped
from llmrun.ui.terminal.format import rate
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean

if TYPE_CHECKING:
    from llmrun.doctor.doctor import Finding


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


@dataclass(frozen=True, slots=True)
class InstalledRow:
    """A model on this disk."""

    name: str
    n_bytes: int  # of its files
    quant: str
    age: float | None  # seconds since llmrun last used it; None if it has not
    place: str


@dataclass(frozen=True, slots=True)
class MatchRow:
    """A repository of the hub that matches a search."""

    repository: str
    downloads: int
    likes: int
    updated: str  # ISO date or ""
    gated: bool


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file with a verdict."""

    path: str
    n_bytes: int
    verdict: str
    why: str


@dataclass(frozen=True, slots=True)
class CatalogueRow:
    """A curated name."""

    alias: str
    parameters: str  # in words, e.g. "135M"
    quant: str  # of the default file
    n_bytes: int  # of the default file
    licence: str
    installed: bool
    fits: bool | None  # into this machine's memory; None if unknown
    fits_now: bool | None = None  # into what is free of it
    memory_bytes: int | None = None  # that it takes
    decode_rate: float | None = None  # predicted tokens/s
    is_exact: bool | None = None  # False: memory and speed are from the file's size alone
    is_lower_bound: bool | None = None  # the speed of a machine that was busy
    agents: bool = True  # False: warned against for coding agents


def show_installed(output: Output, rows: Sequence[InstalledRow]) -> None:
    """Print the models on this disk."""
    columns = (
        Column("NAME", style="bold"),
        Column("SIZE", right=True),
        Column("QUANT"),
        Column("USED"),
        Column("WHERE", style="dim"),
    )
    cells = [
        (row.name, readable_size(row.n_bytes), row.quant, "-" if row.age is None else ago(row.age), row.place)
        for row in rows
    ]
    show_table(output, columns, cells)


def show_matches(output: Output, rows: Sequence[MatchRow]) -> None:
    """Print the repositories that match a search."""
    columns = (
        Column("REPOSITORY", style="bold"),
        Column("DOWNLOADS", right=True),
        Column("LIKES", right=True),
        Column("UPDATED"),
        Column("ACCESS", style="dim"),
    )
    cells = [
        (row.repository, f"{row.downloads:,}", f"{row.likes:,}", row.updated, "terms to accept" if row.gated else "")
        for row in rows
    ]
    show_table(output, columns, cells)


def show_files(output: Output, rows: Sequence[FileRow], headings: tuple[str, str, str, str]) -> None:
    """Print files, with a verdict on each."""
    path, n_bytes, verdict, why = headings
    columns = (Column(path, style="bold"), Column(n_bytes, right=True), Column(verdict), Column(why, style="dim"))
    show_table(output, columns, [(row.path, readable_size(row.n_bytes), row.verdict, row.why) for row in rows])


def ago(seconds: float) -> str:
    """Return a time in the past, e.g. "3 hours ago"."""
    for unit, length in (("year", 31_557_600), ("month", 2_629_800), ("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def show_catalogue(output: Output, rows: Sequence[CatalogueRow]) -> None:
    """Print the curated names; quants, licences and agents where there is room."""
    columns = [
        Column("NAME", style="bold"),
        Column("PARAMETERS", right=True),
        Column("SIZE", right=True),
        Column("MEMORY", right=True),
        Column("DECODE", right=True),
        Column("HERE", style="green"),
        Column("QUANT"),
        Column("LICENCE"),
        Column("AGENTS", style="yellow"),
    ]
    cells = [
        [
            row.alias,
            row.parameters,
            readable_size(row.n_bytes) if row.n_bytes else "",
            estimated(readable_size(row.memory_bytes), row.is_exact) if row.memory_bytes else "",
            estimated(rate(row.decode_rate), row.is_exact, row.is_lower_bound) if row.decode_rate else "",
            _here(row),
            row.quant,
            row.licence,
            "" if row.agents else "weak",
        ]
        for row in rows
    ]
    shown = len(columns) - 3 * (0 < output.columns() < _WIDE)
    show_table(output, columns[:shown], [line[:shown] for line in cells])


AT_LEAST = "≥: at least; other programs slowed this machine down when its speed was measured"


def estimated(text: str, is_exact: bool | None, is_lower_bound: bool | None = False) -> str:
    """Return a figure, marked if it is a lower bound, or from the size of a file alone."""
    return f"≥{text}" if is_lower_bound else f"~{text}" if is_exact is False else text


def _here(row: CatalogueRow) -> str:
    if row.fits is False:
        return "too large"
    state = "yes" if row.installed else "fits" if row.fits else ""
    return f"{state}, not now" if state and row.fits_now is False else state


def show_facts(output: Output, facts: Sequence[tuple[str, object]], *, stderr: bool = False) -> None:
    """Print names and values, one pair a line. Whole numbers get thousands separators; stderr as in show_table()."""
    rows = [(name, _value(value)) for name, value in facts]
    show_table(output, (Column("", style="dim"), Column("")), rows, stderr=stderr)


def show_findings(output: Output, findings: Sequence[Finding]) -> None:
    """Print the findings of doctor, each with its fix below."""
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        rows.append((finding.status, finding.topic, finding.text))
        if finding.fix:
            rows.append(("", "", f"try: {finding.fix}"))
    show_table(output, (Column(""), Column("", style="bold"), Column("")), rows)


_WIDE = 110  # cells of a terminal that has room for all facts of the catalogue
_GAP = 2  # cells between columns
_MIN_TEXT, _MIN_EXCERPT = 20, 12  # cells
_MAX_CELL_ROWS = 3
_UNBROKEN = "\xa0"  # no-break space
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

    On a narrow terminal, cells are wrapped between words, and excerpts cut; if that is not enough, each row becomes a
    record of several lines.

    Args:
        columns: one for each cell of a row.
        rows: untrusted text; newlines become spaces.
        stderr: print there, because the table is not the command's result.
    """
    safe = [[clean(cell) for cell in row] for row in rows]
    columns, safe = _without_dispensable(columns, safe, output.columns(stderr=stderr))
    headings = [column.heading for column in columns]
    heads = [headings] if any(headings) else []
    widths = [max((width(line[index]) for line in heads + safe), default=0) for index in range(len(columns))]
    cells = output.columns(stderr=stderr)
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


def _without_dispensable(
    columns: Sequence[Column], rows: list[list[str]], room: int
) -> tuple[Sequence[Column], list[list[str]]]:
    """Return the columns and cells to show: all but the dispensable ones where only the others fit unbroken."""
    lines = [[column.heading for column in columns], *rows]
    limits = [_MIN_EXCERPT if column.is_excerpt else room for column in columns]
    widths = [min(max(width(line[index]) for line in lines), limit) + _GAP for index, limit in enumerate(limits)]
    needed = [index for index, column in enumerate(columns) if not column.is_dispensable]
    if not sum(widths[index] for index in needed) <= room + _GAP < sum(widths):
        return columns, rows
    return [columns[index] for index in needed], [[row[index] for index in needed] for row in rows]


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
    return heading if cell == "yes" else f"{heading} {cell}".strip() if column.right else cell


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
        """Write names, each with a text beside or below it. A word too long for a row is left to the terminal."""
        room = cells - sum(widths[:-1]) - _GAP * (len(widths) - 1)
        stands_beside = room >= min(widths[-1], _MIN_TEXT)
        for *names, text in rows:
            if not any(names) and width(text) > room:  # a command, to be copied as one line: the terminal wraps it
                self.stream.write(text + "\n")
            elif stands_beside and not room < max(map(width, text.split()), default=0) <= cells - _GAP:
                self.table(columns, [], [[*names, text]], [*widths[:-1], room])
            else:
                styled = [self._paint(name, _style(name, column)) for name, column in zip(names, columns, strict=False)]
                for line in filter(None, (" ".join(filter(None, styled)), *wrapped("  " + text, cells))):
                    self.stream.write(line.rstrip() + "\n")

    def record(self, columns: Sequence[Column], row: Sequence[str], cells: int) -> None:
        """Write a row's first cell, the others below it, and excerpts in lines of their own."""
        first, *rest = zip(row, columns, strict=True)
        self.stream.write(self._paint(_named(*first), _style(*first)).rstrip() + "\n")
        named = [_named(cell, column) for cell, column in rest if cell and not column.is_excerpt]
        whole = [text.replace(" ", _UNBROKEN) if width(text) < cells - 4 else text for text in named]
        lines = [", ".join(whole), *(cell for cell, column in rest if column.is_excerpt)]
        for line in filter(None, lines):
            for part in wrapped("  " + line, cells):
                self.stream.write(part.replace(_UNBROKEN, " ") + "\n")

    def _paint(self, text: str, style: str) -> str:
        return f"{_CODES[style]}{text}\x1b[0m" if self._color and text and style else text


def _style(cell: str, column: Column) -> str:
    return _STATE_STYLES.get(cell, column.style)

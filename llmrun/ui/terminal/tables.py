"""Tables and lists of facts: aligned text; Rich wraps cells where the terminal is narrow.

Owns columns and their order; must not know where the rows come from. Every cell is untrusted text: it is
sanitized, and Rich gets it as Text, so that nothing in it is markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from llmrun.ui.terminal.cells import width, wrapped
from llmrun.ui.terminal.format import size
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean

if TYPE_CHECKING:
    from rich.console import Console

    from llmrun.doctor.doctor import Finding


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, and how its cells are set."""

    heading: str
    right: bool = False
    style: str = ""


@dataclass(frozen=True, slots=True)
class InstalledRow:
    """A model on this disk. n_bytes is the size of its files; age how many seconds ago it was last used."""

    name: str
    n_bytes: int
    quant: str
    age: float
    place: str


@dataclass(frozen=True, slots=True)
class MatchRow:
    """A repository of the hub that a search found. updated is an ISO date or ""."""

    repository: str
    downloads: int
    likes: int
    updated: str
    gated: bool


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file, its bytes, and what is to be said about it."""

    path: str
    n_bytes: int
    verdict: str
    why: str


@dataclass(frozen=True, slots=True)
class CatalogueRow:
    """A curated name. parameters as people write them, e.g. "135M"; quant and n_bytes of what is fetched by default."""

    alias: str
    parameters: str
    quant: str
    n_bytes: int
    licence: str
    installed: bool


def show_installed(output: Output, rows: Sequence[InstalledRow]) -> None:
    """The models on this disk, on stdout."""
    columns = (
        Column("NAME", style="bold"),
        Column("SIZE", right=True),
        Column("QUANT"),
        Column("USED"),
        Column("WHERE", style="dim"),
    )
    show_table(output, columns, [(row.name, size(row.n_bytes), row.quant, ago(row.age), row.place) for row in rows])


def show_matches(output: Output, rows: Sequence[MatchRow]) -> None:
    """What a search on the hub found, on stdout."""
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
    """Files and a verdict on each, on stdout."""
    path, n_bytes, verdict, why = headings
    columns = (Column(path, style="bold"), Column(n_bytes, right=True), Column(verdict), Column(why, style="dim"))
    show_table(output, columns, [(row.path, size(row.n_bytes), row.verdict, row.why) for row in rows])


def ago(seconds: float) -> str:
    """A time in the past, e.g. "3 hours ago"."""
    for unit, length in (("year", 31_557_600), ("month", 2_629_800), ("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def show_catalogue(output: Output, rows: Sequence[CatalogueRow]) -> None:
    """The names that can be run without knowing a repository, on stdout."""
    columns = (
        Column("NAME", style="bold"),
        Column("PARAMETERS", right=True),
        Column("QUANT"),
        Column("SIZE", right=True),
        Column("LICENCE"),
        Column("INSTALLED", style="green"),
    )
    cells = [
        (
            row.alias,
            row.parameters,
            row.quant,
            size(row.n_bytes) if row.n_bytes else "",
            row.licence,
            "yes" if row.installed else "",
        )
        for row in rows
    ]
    show_table(output, columns, cells)


def show_facts(output: Output, facts: Sequence[tuple[str, object]], *, stderr: bool = False) -> None:
    """Names and values, one pair a line. Whole numbers get thousands separators; stderr as in show_table()."""
    rows = [(name, _value(value)) for name, value in facts]
    show_table(output, (Column("", style="dim"), Column("")), rows, stderr=stderr)


def show_findings(output: Output, findings: Sequence[Finding]) -> None:
    """What doctor found, on stdout; the fix stands below its finding."""
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        rows.append((finding.status, finding.topic, finding.text))
        if finding.fix:
            rows.append(("", "", f"try: {finding.fix}"))
    show_table(output, (Column(""), Column("", style="bold"), Column("")), rows)


_GAP = 2  # cells between columns
_LEAST_TEXT = 10
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
    """Any table on stdout. Headings are left out when all are empty.

    Args:
        columns: one for each cell of a row.
        rows: untrusted text; newlines become spaces.
        stderr: it goes there, because it is not the command's result.
    """
    safe = [[clean(cell) for cell in row] for row in rows]
    stream = output.stderr if stderr else output.stdout
    headings = [column.heading for column in columns]
    lines = [headings, *safe] if any(headings) else safe
    widths = [max((width(line[index]) for line in lines), default=0) for index in range(len(columns))]
    color = output.stderr_has_color if stderr else output.stdout_has_color
    room = output.columns(stderr=stderr) - _GAP * (len(widths) - 1)
    if not output.columns(stderr=stderr) or sum(widths) <= room:
        _show_lines(stream, columns, lines, widths, color=color)  # without Rich, which takes longer than most commands
        return
    least = [_least([line[index] for line in lines], column, room) for index, column in enumerate(columns)]
    if not any(headings):  # facts: the text behind their names flows
        least[-1] = min(least[-1], _LEAST_TEXT)
    if sum(least) <= room or not any(headings):
        _show_rich(output.console(stderr=stderr), columns, safe, _shrunk(widths, least, room))
    else:
        _show_records(stream, columns, safe, output.columns(stderr=stderr), color=color)


def _least(cells: Sequence[str], column: Column, room: int) -> int:
    """How narrow a column may become: no name, number or word is split, but where it takes half of the room."""
    is_whole = column.right or column.style == "bold"
    parts = (part for cell in cells for part in ([cell] if is_whole else cell.split()))
    return min(max(map(width, parts), default=0), room // 2)


def _shrunk(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths that fit, taken from the columns that have most to give."""
    found = list(widths)
    while sum(found) > room:
        found[max(range(len(found)), key=lambda index: found[index] - least[index])] -= 1
    return found


def _show_records(stream: TextIO, columns: Sequence[Column], rows: list[list[str]], cells: int, *, color: bool) -> None:
    """Where no table fits: each row's first cell, and the others below it."""
    for first, *rest in rows:
        style = _CODES.get(columns[0].style, "") if color else ""
        stream.write(f"{style}{first}\x1b[0m\n" if style else f"{first}\n")
        named = [_named(cell, column) for column, cell in zip(columns[1:], rest, strict=True) if cell]
        for row in wrapped("  " + ", ".join(named), cells) if named else ():
            stream.write(f"{row}\n")
    stream.flush()


def _named(cell: str, column: Column) -> str:
    """A cell that says by itself what it is."""
    heading = column.heading.lower()
    return heading if cell == "yes" else f"{heading} {cell}" if column.right else cell


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _show_lines(
    stream: TextIO, columns: Sequence[Column], lines: list[list[str]], widths: Sequence[int], *, color: bool
) -> None:
    heads = lines and lines[0] == [column.heading for column in columns]
    for number, line in enumerate(lines):
        cells = []
        for index, (cell, column) in enumerate(zip(line, columns, strict=True)):
            padding = " " * (widths[index] - width(cell))
            style = "dim" if heads and number == 0 else _STATE_STYLES.get(cell, column.style)
            styled = f"{_CODES[style]}{cell}\x1b[0m" if color and cell and style else cell
            last = index == len(columns) - 1
            cells.append(padding + styled if column.right else styled + padding * (not last))
        stream.write((" " * _GAP).join(cells).rstrip() + "\n")
    stream.flush()


def _show_rich(console: Console, columns: Sequence[Column], rows: list[list[str]], widths: Sequence[int]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None,
        show_header=any(column.heading for column in columns),
        header_style="dim",
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for column, cells in zip(columns, widths, strict=True):
        table.add_column(
            Text(column.heading),  # a str would be markup
            justify="right" if column.right else "left",
            style=column.style,
            overflow="fold",
            width=cells,
        )
    for row in rows:
        table.add_row(*(Text(cell, style=_STATE_STYLES.get(cell, "")) for cell in row))
    console.print(table)

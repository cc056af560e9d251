"""Tables and lists of facts: Rich on a terminal, aligned text without box or colour everywhere else.

Owns columns and their order; must not know where the rows come from. Every cell is foreign text: it is
sanitized, and Rich gets it as Text, so that nothing in it is markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmrun.doctor import Finding
from llmrun.ui.cells import width
from llmrun.ui.figures import size
from llmrun.ui.output import Output
from llmrun.ui.sanitize import clean


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, and how its cells are set."""

    heading: str
    right: bool = False
    style: str = ""


@dataclass(frozen=True, slots=True)
class InstalledRow:
    """A model on this disk. n_bytes is the size of its files; source its repository or path."""

    name: str
    n_bytes: int
    quant: str
    source: str


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
        Column("FROM", style="dim"),
    )
    show_table(output, columns, [(row.name, size(row.n_bytes), row.quant, row.source) for row in rows])


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


def show_facts(output: Output, facts: Sequence[tuple[str, object]], *, title: str = "") -> None:
    """Names and values, one pair a line, on stdout. Whole numbers get thousands separators."""
    if title:
        output.text(clean(title))
    rows = [(name, _value(value)) for name, value in facts]
    show_table(output, (Column("", style="dim"), Column("")), rows)


def show_findings(output: Output, findings: Sequence[Finding]) -> None:
    """What doctor found, on stdout; the fix stands below its finding."""
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        rows.append((finding.status, finding.topic, finding.text))
        if finding.fix:
            rows.append(("", "", f"try: {finding.fix}"))
    show_table(output, (Column(""), Column("", style="bold"), Column("")), rows)


_STATE_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def show_table(output: Output, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Any table on stdout. Headings are left out when all are empty.

    Args:
        columns: one for each cell of a row.
        rows: foreign text; newlines become spaces.
    """
    safe = [[clean(cell) for cell in row] for row in rows]
    if output.stdout_is_terminal:
        _show_rich(output, columns, safe)
    else:
        _show_plain(output, columns, safe)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _show_plain(output: Output, columns: Sequence[Column], rows: list[list[str]]) -> None:
    headings = [column.heading for column in columns]
    lines = [headings, *rows] if any(headings) else rows
    widths = [max((width(line[index]) for line in lines), default=0) for index in range(len(columns))]
    for line in lines:
        cells = []
        for cell, cells_wide, column in zip(line, widths, columns, strict=True):
            padding = " " * (cells_wide - width(cell))
            cells.append(padding + cell if column.right else cell + padding)
        output.text("  ".join(cells).rstrip())


def _show_rich(output: Output, columns: Sequence[Column], rows: list[list[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None,
        show_header=any(column.heading for column in columns),
        header_style="dim",
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        table.add_column(
            Text(column.heading),  # a str would be markup
            justify="right" if column.right else "left",
            style=column.style,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(cell, style=_STATE_STYLES.get(cell, "")) for cell in row))
    output.console().print(table)

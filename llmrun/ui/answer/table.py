"""A Markdown table as rows of text: Rich's columns if they fit, else one record after the other.

Owns the layout; must not know streams or the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from llmrun.ui.terminal.cells import shrunk, width

_MIN_COLUMN = 8  # cells; a table that needs narrower columns, or would break a word, becomes records
_BOLD, _DIM = Style(bold=True), Style(dim=True)


def table_rows(
    headings: Sequence[Text], rows: Sequence[Sequence[Text]], right: Sequence[bool], columns: int, *, unicode: bool
) -> list[Text]:
    """Return the rows of a table.

    Args:
        right: whether each column is right-aligned.
        columns: of the terminal.
    """
    texts = [[cell.plain for cell in cells] for cells in zip(headings, *rows, strict=True)]
    words = [max((width(word) for text in column for word in text.split()), default=0) for column in texts]
    natural = [max(map(width, column)) for column in texts]
    minimum = [max(cells, min(limit, _MIN_COLUMN)) for cells, limit in zip(words, natural, strict=True)]
    room = columns - 2 * (len(texts) - 1)
    if sum(minimum) > room:
        return _records(headings, rows, "─" if unicode else "-")
    widths = shrunk(natural, minimum, room)
    table = Table(
        box=box.SIMPLE_HEAD if unicode else box.ASCII,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style=_BOLD,
        border_style=_DIM,
    )
    for heading, is_right, cells in zip(headings, right, widths, strict=True):
        table.add_column(heading, justify="right" if is_right else "left", overflow="fold", width=cells)
    for row in rows:
        table.add_row(*row)
    console = Console(file=StringIO(), width=columns, height=1, force_terminal=True, color_system="standard")
    lines = console.render_lines(table, pad=False)
    return [_trimmed(Text.assemble(*((one.text, one.style or "") for one in line))) for line in lines]


def _records(headings: Sequence[Text], rows: Sequence[Sequence[Text]], line: str) -> list[Text]:
    records = []
    for row in rows:
        for heading, cell in zip(headings, row, strict=True):
            if cell:
                records.append(Text.assemble((heading.plain, _BOLD), ": " if heading else "", cell))
        records.append(Text(line * 3, _DIM))
    return records


def _trimmed(row: Text) -> Text:
    row.rstrip()
    return row

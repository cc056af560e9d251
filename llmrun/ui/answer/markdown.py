"""Streamed Markdown on a terminal; output is never taken back.

Owns the decision what is final, and the look of each block; must not know the terminal, the live line or the engine.
Text of a paragraph comes word by word, code line by line, a table when it is complete. Nothing is shown that could
still become something else, so the result is a function of the text, however it was split. The text must be sanitized;
all escapes in the result are styles, and none stays in force.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from llmrun.ui.answer.blocks import BlockKind, BlockLine, Blocks, Container
from llmrun.ui.answer.formula import readable
from llmrun.ui.answer.highlight import Highlighter
from llmrun.ui.answer.inline import INDENTED, Inline
from llmrun.ui.answer.rows import RowWriter
from llmrun.ui.answer.table import table_rows
from llmrun.ui.terminal.cells import cut, width

# Longer tables are shown in parts.
MAX_TABLE_ROWS = 100

_RULE_CELLS = 40
_LABEL_CELLS = 24
_MIN_COLUMNS = 4
_MIN_TEXT = 10  # cells that quotes and lists leave for text on a narrow screen
_DIM = Style(dim=True)
_HEADINGS = {"#": Style(bold=True, underline=True), "##": Style(bold=True)}
_LATER_HEADINGS = Style(bold=True, italic=True)


class Markdown:
    """The Markdown of one answer.

    Args:
        styled: the terminal may show bold, dim and colour; otherwise marks like ** stay in the text.
        unicode: bullets and lines may be characters other than ASCII.
    """

    def __init__(self, *, styled: bool = True, unicode: bool = True) -> None:
        self._styled, self._unicode, self._formulas = styled, unicode, styled and unicode
        self._bullets, self._bar, self._dash = ("•◦▪", "│ ", "─") if unicode else ("-*+", "| ", "-")
        self._rows, self._blocks = RowWriter(styled=styled), Blocks()
        self._columns = _MIN_COLUMNS
        self._line = ""  # the source line so far
        self._is_streaming = False  # its text is shown as it comes
        self._inline: Inline | None = None  # the open paragraph
        self._blank_in: tuple[Container, ...] | None = None  # an empty line, pending until the next block
        self._any = False  # there was output
        self._highlighter: Highlighter | None = None  # of the open code block
        self._fence_in: tuple[Container, ...] = ()
        self._table: list[BlockLine] = []

    @property
    def held(self) -> str:
        """The kind and size of a table that is held back; "" for none."""
        return f"table of {len(self._table) - 1} rows" if len(self._table) > 1 else ""

    def feed(self, text: str, columns: int) -> str:
        """Add text; return the part that can be shown.

        Args:
            columns: of the terminal, for rows that begin from now on.
        """
        self._columns = max(columns - 1, _MIN_COLUMNS)
        *lines, rest = text.split("\n")
        out = [self._piece(line) + self._line_end() for line in lines]
        out.append(self._piece(rest))
        return "".join(out)

    def flush(self, columns: int) -> str:
        """Return the rest at the end of the text."""
        self._columns = max(columns - 1, _MIN_COLUMNS)
        out = self._line_end() if self._line else ""
        return out + "".join(map(self._show, self._blocks.flush())) + self._end_block()

    # ---- a source line, as it comes ----------------------------------------------------------------

    def _piece(self, text: str) -> str:
        """Return the output of a part of a line; a paragraph's text is shown at once."""
        self._line += text
        if self._is_streaming:
            return self._more(text) if self._inline else text
        line = self._blocks.early(self._line) if text else None
        self._is_streaming = line is not None
        output = self._show(line) if line else ""
        return output if self._inline else output.removesuffix("\n")

    def _line_end(self) -> str:
        streamed, line = self._is_streaming, self._line
        self._line, self._is_streaming = "", False
        if not streamed:
            return "".join(map(self._show, self._blocks.take(line)))
        return "" if self._inline else "\n"

    def _show(self, line: BlockLine) -> str:
        """Return the output of a line whose kind is known."""
        if line.kind is BlockKind.TEXT and not line.begins and self._inline:
            return self._more("\n" + line.text)
        if line.kind is BlockKind.CODE and self._highlighter:
            return self._row(self._prefix(line.path), self._highlighter.line(line.text))
        if line.kind is BlockKind.ROW and len(self._table) <= MAX_TABLE_ROWS:
            self._table.append(line)
            return ""
        headings, was_text = self._table[:1], self._inline is not None
        out = self._end_block()
        if line.kind is BlockKind.BLANK:
            self._blank_in = line.path if self._blank_in is None else self._blank_in[: len(line.path)]
        elif line.kind is BlockKind.TABLE:
            self._table = [line]
        elif line.kind is BlockKind.ROW:
            self._table = [*headings, line]
        elif line.kind is not BlockKind.FENCE_END and (
            line.kind is not BlockKind.NOTHING or line.n_old < len(line.path)
        ):
            if line.kind is BlockKind.HEADING and was_text:
                self._blank_in = ()
            out += self._begin(line)
        return out

    def _begin(self, line: BlockLine) -> str:
        """Return the output of a line that begins a block."""
        out, (first, rest) = self._gap(line), self._prefixes(line)
        if line.kind is BlockKind.TEXT:
            indented = line.text.startswith(" " * INDENTED)
            self._inline = self._made_inline(indented=indented)
            return out + self._rows.begin(first, rest) + self._more(line.text)
        if line.kind is BlockKind.HEADING:
            text = self._whole(line.text, _HEADINGS.get(line.mark, _LATER_HEADINGS))
            first = first if self._styled else Text.assemble(first, line.mark, " ")
            return out + self._rows.begin(first, rest) + self._rows.add(text, self._columns) + "\n"
        if line.kind is BlockKind.NOTHING:
            return out + self._row(first)
        if line.kind in {BlockKind.RULE, BlockKind.UNDERLINE}:
            return out + self._row(first, self._dashes(first))
        if line.kind is BlockKind.FENCE:
            words = line.text.split()
            self._highlighter, self._fence_in = Highlighter(words[0].strip("{.}") if words else ""), line.path
            return out + self._row(first, self._dashes(first, words[0] if words else ""))
        source = readable(line.text) if line.kind is BlockKind.FORMULA and self._formulas else line.text
        shown = [self._row(rest if number else first, Text(one)) for number, one in enumerate(source.split("\n"))]
        return out + "".join(shown) if source or line.kind is BlockKind.VERBATIM else ""

    def _end_block(self) -> str:
        """Return the end of the open block, if there is one."""
        out = ""
        if self._inline:
            out = self._rows.add(self._inline.end(), self._columns) + "\n"
        elif self._highlighter:
            prefix = self._prefix(self._fence_in)
            out = self._row(prefix, self._dashes(prefix))
        elif self._table:
            out = self._table_shown(*self._table)
        self._inline = self._highlighter = None
        self._table = []
        return out

    def _table_shown(self, head: BlockLine, *rows: BlockLine) -> str:
        out, (first, rest) = self._gap(head), self._prefixes(head)
        cells = [[self._whole(cell) for cell in row.cells] for row in (head, *rows)]
        room = self._columns - width(first.plain)
        shown = table_rows(cells[0], cells[1:], head.right, room, unicode=self._unicode)
        for row in shown:
            out += self._rows.begin(first, rest) + self._rows.add(row, self._columns) + "\n"
            first = rest
        return out

    def _more(self, source: str) -> str:
        """Return the output of more text of the open paragraph."""
        texts = self._inline.feed(source) if self._inline else ()
        return "".join([self._rows.add(text, self._columns) for text in texts])

    def _made_inline(self, *, style: Style | None = None, indented: bool = False) -> Inline:
        references = self._blocks.references
        return Inline(references, styled=self._styled, formulas=self._formulas, style=style, indented=indented)

    def _whole(self, source: str, style: Style | None = None) -> Text:
        """Return the rendered text of one line."""
        inline = self._made_inline(style=style)
        return Text().join([*inline.feed(source), inline.end()])

    # ---- prefixes of rows --------------------------------------------------------------------------

    def _gap(self, line: BlockLine) -> str:
        """Return the empty line before a line, if any. Several become one; the first line has none."""
        within, any_before = self._blank_in, self._any
        self._blank_in, self._any = None, True
        if within is None or not any_before:
            return ""
        return self._row(self._prefix(line.path[: min(len(within), line.n_old)]))

    def _prefixes(self, line: BlockLine) -> tuple[Text, Text]:
        """Return the prefixes of a line's first row and of its other rows."""
        return self._prefix(line.path, line.n_old), self._prefix(line.path)

    def _prefix(self, path: Sequence[Container], n_old: int | None = None) -> Text:
        """Return bars and indentation, and markers from container n_old on; on a narrow screen the innermost."""
        parts, depth = [], 0
        for number, one in enumerate(path):
            bullet = self._bullets[min(depth, len(self._bullets) - 1)]
            marker = f"{one.marker if one.marker[:1].isdigit() else bullet} " if one.marker else self._bar
            is_new = n_old is not None and number >= n_old
            parts.append(Text(marker if is_new or not one.marker else " " * len(marker), "" if one.marker else _DIM))
            depth += bool(one.marker)
        room = max(self._columns - _MIN_TEXT, 2)
        while len(parts) > 1 and sum(map(len, parts)) > room:
            del parts[0]
        return Text.assemble(*parts)

    def _dashes(self, prefix: Text, label: str = "") -> Text:
        """Return a line across, with the name of a language in it."""
        cells = min(self._columns - len(prefix), _RULE_CELLS)
        name = f"{self._dash * 2} {cut(label, min(_LABEL_CELLS, max(cells - 4, 0)))} " if label else ""
        return Text(name + self._dash * (cells - width(name)), _DIM)

    def _row(self, prefix: Text, text: Text | None = None) -> str:
        row = Text.assemble(prefix, text or "")
        if not text:
            row.rstrip()
        return self._rows.painted(row) + "\n"

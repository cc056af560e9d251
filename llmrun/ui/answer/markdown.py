"""Markdown as a terminal shows it, made while it comes: what was given out is never taken back.

Owns how each block looks; must not know the terminal, the live line or the engine. Text of a paragraph, a heading or
an item comes word by word, code line by line, a table when it is complete. Nothing is shown that could still become
something else, so the result is a function of the text so far, whatever pieces it came in. The text must be
sanitized; all escapes in the result are styles, and none stays in force.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.ui.answer.blocks import BlockLine, Container, LineKind, closes_fence, inside_fence, is_delimiter, parse_line
from llmrun.ui.answer.grid import Grid, lay_out
from llmrun.ui.answer.highlight import MAX_LINE, Highlighter
from llmrun.ui.answer.inline import Inline
from llmrun.ui.answer.wrap import Wrapper
from llmrun.ui.terminal.ansi import BOLD, DIM, ITALIC, UNDERLINE, Span, paint
from llmrun.ui.terminal.cells import cut, width

# A table that is longer is shown this far, and its later rows in the same layout.
MAX_TABLE_LINES = 100
MAX_TABLE_CHARACTERS = 16_000

_RULE_CELLS = 40
_LABEL_CELLS = 24
_LEAST_COLUMNS = 4
_ROOM_BESIDE_PREFIX = 10  # cells that quotes and lists leave for text on a narrow screen
_HEADING_STYLES = {1: f"{BOLD};{UNDERLINE}", 2: BOLD}
_LATER_HEADINGS = f"{BOLD};{ITALIC}"


class Markdown:
    """One answer.

    Args:
        styled: the terminal may show bold, dim and colour; otherwise marks like ** stay as they were written.
        unicode: bullets and lines may be other than ASCII.
    """

    def __init__(self, *, styled: bool = True, unicode: bool = True) -> None:
        self._styled = styled
        self._bullets, self._bar, self._dash = ("•◦▪", "│ ", "─") if unicode else ("-*+", "| ", "-")
        self._wrapper, self._inline = Wrapper(styled=styled), Inline()
        self._columns = _LEAST_COLUMNS
        self._line = ""  # the source line so far, while its kind is not known
        self._containers: tuple[Container, ...] = ()
        self._style: str | None = None  # of the line that is being shown as it comes; None when there is none
        self._in_text = False  # the line before was a paragraph's
        self._blank_in: tuple[Container, ...] | None = None  # an empty line that waits for what comes after it
        self._any = False  # something was given out
        self._fence = ""  # what opened the code block, e.g. "```"; "" outside of one
        self._highlighter = Highlighter("")
        self._raw_code = False  # an endless line of code is shown as it comes
        self._table: list[BlockLine] = []  # lines that are, or may become, a table
        self._grid: Grid | None = None

    @property
    def held(self) -> str:
        """What is being held back because it needs its end, in words; "" when it is a few words at most."""
        return f"table of {len(self._table) - 2} rows" if len(self._table) > 2 else ""

    def feed(self, text: str, columns: int) -> str:
        """More text. Gives what can be shown now.

        Args:
            columns: of the terminal; from the next row on, rows are made for it.
        """
        self._columns = max(columns - 1, _LEAST_COLUMNS)
        *lines, rest = text.split("\n")
        out = [self._piece(line) + self._line_end() for line in lines]
        out.append(self._piece(rest))
        return "".join(out)

    def flush(self, columns: int) -> str:
        """The rest, when no more text comes."""
        self._columns = max(columns - 1, _LEAST_COLUMNS)
        unfinished = self._line or self._style is not None or self._raw_code
        out = self._line_end() if unfinished else ""
        return out + self._table_end() + (self._fence_end() if self._fence else "")

    # ---- a source line, as it comes ----------------------------------------------------------------

    def _piece(self, text: str) -> str:
        """A part of a line."""
        if not text:
            return ""
        if self._style is not None:
            return self._show(self._marks(text))
        if self._raw_code:
            return text
        self._line += text
        return self._decide(complete=False)

    def _line_end(self) -> str:
        out = ""
        if self._style is None and not self._raw_code:
            out = self._decide(complete=True)
            self._line = ""
        if self._style is not None:
            out += self._text_end()
        elif self._raw_code:
            self._raw_code = False
            out += "\n"
        return out

    def _decide(self, *, complete: bool) -> str:
        """Show the line as what it is, if that is known."""
        if self._fence:
            return self._code_line(complete=complete)
        line = parse_line(
            self._line,
            self._containers,
            complete=complete,
            in_text=self._in_text,
            verbatim=self._inline.in_formula,
        )
        if line is None:
            return ""
        if line.kind is LineKind.TABLE and self._goes_on(line):
            return self._table_line(line)
        out = self._table_end()
        if line.kind is LineKind.TABLE:
            return out + self._table_line(line)
        return out + self._open(line)

    def _open(self, line: BlockLine) -> str:
        if line.kind is LineKind.BLANK:
            self._containers, self._in_text, self._blank_in = line.containers, False, line.containers
            self._inline.leave_formula()
            return ""
        if line.kind is LineKind.HEADING and self._in_text:
            self._blank_in = ()
        out = self._gap(line)
        first, rest = self._prefixes(line)
        self._containers, self._in_text, self._any = line.containers, line.kind is LineKind.TEXT, True
        if line.kind in {LineKind.TEXT, LineKind.HEADING}:
            return out + self._text_begins(line, first, rest)
        if line.kind is LineKind.CODE:
            return out + self._raw(rest, line.text)
        if line.kind is LineKind.FENCE:
            self._fence = line.mark
            words = line.text.split()
            self._highlighter = Highlighter(words[0].strip("{.}") if words and self._styled else "")
            return out + self._row([*first, *self._dashes(first, words[0] if words else "")]) + "\n"
        return out + self._row([*first, *self._dashes(first)]) + "\n"

    def _raw(self, prefix: Sequence[Span], text: str) -> str:
        """The begin of a line that is shown as it comes, and wrapped by the terminal."""
        self._line, self._raw_code = "", True
        return self._row(prefix) + text

    # ---- text --------------------------------------------------------------------------------------

    def _text_begins(self, line: BlockLine, first: list[Span], rest: list[Span]) -> str:
        level = len(line.mark)
        self._style = (_HEADING_STYLES.get(level, _LATER_HEADINGS) if level else "") if self._styled else ""
        if line.mark and not self._styled:
            first = [*first, (f"{line.mark} ", "")]
        if not line.text:
            first = _without_blanks(first)
        out = self._wrapper.begin(first, rest)
        self._line = ""
        return out + self._show(self._marks(line.text))

    def _marks(self, text: str) -> list[Span]:
        """The text's styles; without styles the marks stay what they are."""
        spans = self._inline.feed(text, self._style or "")
        return spans if self._styled else [(text, "")]

    def _show(self, spans: Sequence[Span]) -> str:
        return "".join([self._wrapper.add(text, style, self._columns) for text, style in spans])

    def _text_end(self) -> str:
        spans = self._inline.end(self._style or "")
        self._style = None
        return self._show(spans if self._styled else ()) + self._wrapper.end(self._columns)

    # ---- code --------------------------------------------------------------------------------------

    def _code_line(self, *, complete: bool) -> str:
        if not complete and len(self._line) <= MAX_LINE:
            return ""
        text = inside_fence(self._line, self._containers)
        if text is None:
            return self._fence_end() + self._decide(complete=complete)
        if len(self._line) > MAX_LINE:
            return self._raw(self._inside(self._containers), text)
        if closes_fence(text, self._fence):
            return self._fence_end()
        return self._row([*self._inside(self._containers), *self._highlighter.line(text)]) + "\n"

    def _fence_end(self) -> str:
        self._fence = ""
        prefix = self._inside(self._containers)
        return self._row([*prefix, *self._dashes(prefix)]) + "\n"

    # ---- tables ------------------------------------------------------------------------------------

    def _goes_on(self, line: BlockLine) -> bool:
        """Whether a row belongs to the table before it, if there is one."""
        before = self._table[-1].containers if self._table else self._containers
        is_row = len(self._table) != 1 or is_delimiter(line.text)
        return is_row and line.containers == before and line.n_old == len(before)

    def _table_line(self, line: BlockLine) -> str:
        self._containers, self._in_text = line.containers, False
        if self._grid is not None:
            return self._grid_rows(self._grid.rows(line.text))
        self._table.append(line)
        too_long = sum(len(row.text) for row in self._table) > MAX_TABLE_CHARACTERS
        if len(self._table) >= MAX_TABLE_LINES or (too_long and len(self._table) > 1):
            return self._table_shown()
        return ""

    def _table_end(self) -> str:
        """Show the table that the lines held back are; a single one is text."""
        lines, out = self._table, ""
        if len(lines) == 1:
            self._table = []
            line = BlockLine(LineKind.TEXT, lines[0].containers, lines[0].n_old, lines[0].text)
            kept = self._line
            out = self._open(line) + self._text_end()
            self._line = kept
        elif lines:
            out = self._table_shown()
        self._grid = None
        return out

    def _table_shown(self) -> str:
        lines, self._table = self._table, []
        out = self._gap(lines[0])
        self._any, (first, _) = True, self._prefixes(lines[0])
        room = self._columns - sum(width(text) for text, _ in first)
        self._grid = lay_out([line.text for line in lines], room, styled=self._styled, line=self._dash)
        rows = self._grid.head()
        for line in lines[2:]:
            rows += self._grid.rows(line.text)
        return out + self._grid_rows(rows, first)

    def _grid_rows(self, rows: Sequence[Sequence[Span]], first: list[Span] | None = None) -> str:
        rest, out = self._inside(self._containers), []
        for row in rows:
            out += [self._wrapper.begin(first or rest, rest), self._show(row), self._wrapper.end(self._columns)]
            first = None
        return "".join(out)

    # ---- what stands before the text of a row -----------------------------------------------------

    def _gap(self, line: BlockLine) -> str:
        """The empty line before a line, if there was one: any number of them is one, and none is the first."""
        within, self._blank_in = self._blank_in, None
        if within is None or not self._any:
            return ""
        n_common = min(len(within), line.n_old)
        return self._row(_without_blanks(self._inside(line.containers[:n_common]))) + "\n"

    def _prefixes(self, line: BlockLine) -> tuple[list[Span], list[Span]]:
        """What the first row of a line begins with, and the rows after it."""
        rest = self._inside(line.containers)
        n_items = sum(bool(one.marker) for one in line.containers[: line.n_old])
        first = self._prefix(line.containers[: line.n_old])
        for container in line.containers[line.n_old :]:
            if container.marker:
                first.append((self._marker(container, n_items), ""))
                n_items += 1
            else:
                first.append((self._bar, DIM))
        return self._narrowed(first), rest

    def _inside(self, containers: Sequence[Container]) -> list[Span]:
        return self._narrowed(self._prefix(containers))

    def _prefix(self, containers: Sequence[Container]) -> list[Span]:
        return [(" " * len(self._marker(one, 0)), "") if one.marker else (self._bar, DIM) for one in containers]

    def _marker(self, item: Container, depth: int) -> str:
        bullet = self._bullets[min(depth, len(self._bullets) - 1)]
        return f"{item.marker if item.marker[0].isdigit() else bullet} "

    def _narrowed(self, prefix: list[Span]) -> list[Span]:
        """What fits beside some text: the innermost part of it."""
        room = max(self._columns - _ROOM_BESIDE_PREFIX, 2)
        while len(prefix) > 1 and sum(width(text) for text, _ in prefix) > room:
            prefix = prefix[1:]
        return prefix

    def _dashes(self, prefix: Sequence[Span], label: str = "") -> list[Span]:
        """A line across, with the name of a language in it."""
        cells = min(self._columns - sum(width(text) for text, _ in prefix), _RULE_CELLS)
        name = f"{self._dash * 2} {cut(label, min(_LABEL_CELLS, max(cells - 4, 0)))} " if label else ""
        return [(name + self._dash * (cells - width(name)), DIM)]

    def _row(self, spans: Sequence[Span]) -> str:
        return "".join([paint(text, style if self._styled else "") for text, style in spans])


def _without_blanks(row: list[Span]) -> list[Span]:
    """A row without the blanks at its end."""
    while row:
        text, style = row.pop()
        if text.strip(" "):
            return [*row, (text.rstrip(" "), style)]
    return row

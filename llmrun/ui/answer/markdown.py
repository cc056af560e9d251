"""Streamed Markdown on a terminal; output is never taken back.

Text of a paragraph comes word by word, code line by line, a table when it is complete. Nothing is shown that could
still become something else, so the result is a function of the text, however it was split. Lines such as "[1]: http://x"
or "[Alice]: hello" are text: Markdown takes them for definitions of links, and shows them nowhere. The text must be
sanitized; all escapes in the result are styles, and none stays in force.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import StringIO
from typing import Any

from markdown_it.token import Token
from pygments.lexer import ExtendedRegexLexer, LexerContext, RegexLexer
from pygments.lexers import find_lexer_class_by_name
from pygments.token import Comment, Error, Generic, Keyword, Literal, Name, Operator, Punctuation
from pygments.util import ClassNotFound
from rich import box
from rich.console import Console
from rich.style import Style
from rich.syntax import ANSISyntaxTheme
from rich.table import Table
from rich.text import Text

from llmrun.ui.answer.inline import CLOSING, FORMULA, INDENTED, Inline, block_parser, formula_begins, readable
from llmrun.ui.answer.rows import RowWriter
from llmrun.ui.terminal.cells import cut, shrunk, width

# A longer line of code is shown as it comes, without colours.
MAX_LINE = 400

_EMPTY_MARKERS = re.compile(r"(?:[-+*>]|\d{1,9}[.)]|\s)*")
_LABEL = re.compile(r"\[[^\[\]]{1,200}\]:")  # of a line of its own
_MAY_BE_LABEL = re.compile(r"\[[^\[\]]{0,200}\]?\Z")
# Beginnings of lines that may still become something other than a paragraph's text.
_UNDECIDED = re.compile(
    r"(?:[-_*](?:[-_* \t])*|\+|#{1,6}|=+[ \t]*|\d{1,9}[.)]?|[`~]{1,2}|\\|\$|)\Z|[`~]{3}|\||<[A-Za-z/!?]|<\Z|\\\[|\$\$"
)


class BlockKind(enum.Enum):
    """The kind of a line."""

    BLANK = enum.auto()
    TEXT = enum.auto()  # of a paragraph
    HEADING = enum.auto()
    UNDERLINE = enum.auto()  # makes the paragraph before it a heading
    RULE = enum.auto()
    FENCE = enum.auto()  # opens code
    CODE = enum.auto()  # a line inside a fence
    FENCE_END = enum.auto()
    VERBATIM = enum.auto()  # indented code, HTML
    FORMULA = enum.auto()
    TABLE = enum.auto()  # its headings
    ROW = enum.auto()  # of a table
    NOTHING = enum.auto()  # a marker without text


# Blocks that continue in the next line; all but paragraphs consist of whole lines.
_CONTINUES = {BlockKind.TEXT, BlockKind.FENCE, BlockKind.VERBATIM, BlockKind.FORMULA, BlockKind.TABLE}
_LEAVES = {
    "paragraph_open": BlockKind.TEXT,
    "heading_open": BlockKind.HEADING,
    "hr": BlockKind.RULE,
    "fence": BlockKind.FENCE,
    "code_block": BlockKind.VERBATIM,
    "html_block": BlockKind.VERBATIM,
    FORMULA: BlockKind.FORMULA,
    "table_open": BlockKind.TABLE,
}


@dataclass(frozen=True, slots=True)
class Container:
    """A quote, or an item of a list."""

    marker: str  # "-" or "12." of an item, "" of a quote
    line: int  # index of the opening line among the lines parsed together


@dataclass(frozen=True, slots=True)
class BlockLine:
    """A line whose kind is known."""

    kind: BlockKind
    path: tuple[Container, ...]  # its containers, the outermost first
    n_old: int  # number of these that earlier lines were in as well
    begins: bool = True  # the line begins its block
    text: str = ""  # without block marks; leading blanks stay
    mark: str = ""  # "##" of a heading, "=" of an underline
    cells: Sequence[str] = ()  # of a table's row
    right: Sequence[bool] = ()  # of a table, whether each column is right-aligned


@dataclass(slots=True)
class _Parsed:
    """The last block of some parsed lines, with its line range and its containers."""

    n_lines: int
    path: tuple[Container, ...] = ()
    kind: BlockKind = BlockKind.NOTHING
    first: int = 0
    end: int = 0
    token: Token = field(default_factory=lambda: Token("", "", 0))
    content: str = ""
    cells: list[str] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    begins: dict[int, int] = field(default_factory=dict)  # line -> start of its text after the markers of containers


class Blocks:
    """The block structure of one text."""

    def __init__(self) -> None:
        self._open: list[str] = []  # lines that reopen the open blocks
        self._closed: list[str] = []  # the same lines, their blocks closed and their containers open
        self._path: tuple[Container, ...] = ()
        self._kind = BlockKind.BLANK  # of the open block
        self._held: list[str] = []  # possible headings of a table

    def early(self, line: str) -> BlockLine | None:
        """Take the beginning of a line if it is certainly text of a paragraph, or a very long line of code."""
        in_code = self._kind in {BlockKind.FENCE, BlockKind.VERBATIM}
        waits = self._held or self._kind in {BlockKind.TABLE, BlockKind.FORMULA} or (in_code and len(line) <= MAX_LINE)
        if waits or _UNDECIDED.match(line.strip()):
            return None
        parsed = _parse([*self._open, line])
        found = self._found(parsed, line)
        if len(line) > MAX_LINE and found.kind in {BlockKind.CODE, BlockKind.VERBATIM}:
            return self._follow(parsed, [line])
        text = found.text.strip()
        if found.kind is not BlockKind.TEXT or _UNDECIDED.match(text) or _MAY_BE_LABEL.match(text):
            return None
        return self._follow(parsed, [line])

    def take(self, line: str) -> list[BlockLine]:
        """Take a complete line; return it after the lines that waited for it."""
        lines, n_open = [*self._held, line], len(self._open)
        parsed = _parse([*self._open, *lines])
        if self._held and parsed.kind is BlockKind.TABLE and parsed.first == n_open:
            self._held = []
            return [self._follow(parsed, lines)]
        if self._held:
            return [*self.flush(), *self.take(line)]
        if parsed.kind is BlockKind.TEXT and line[parsed.begins.get(n_open, 0) :].startswith("|"):
            self._held = lines
            return []
        return [self._follow(parsed, lines)]

    def flush(self) -> list[BlockLine]:
        """Return the waiting lines as text."""
        held, self._held = self._held, []
        return [self._follow(_parse([*self._open, line]), [line]) for line in held]

    def _follow(self, parsed: _Parsed, new: list[str]) -> BlockLine:
        """Update the open blocks after parsed lines; return the last line."""
        found = self._found(parsed, new[-1])
        lines, n_open = [*self._open, *new], len(self._open)
        closed = [*self._closed, *(_without_text(line, n_open + index, parsed) for index, line in enumerate(new))]
        self._kind = _left_open(found)
        n_lines = {BlockKind.BLANK: 0, BlockKind.TABLE: 2}.get(self._kind, 1)
        begin = set(range(parsed.first, parsed.first + n_lines))
        order = sorted({container.line for container in found.path} | begin)
        self._open = [lines[index] if index in begin else closed[index] for index in order]
        self._closed = [closed[index] for index in order]
        self._path = tuple(Container(one.marker, order.index(one.line)) for one in found.path)
        return found

    def _found(self, parsed: _Parsed, line: str) -> BlockLine:
        """Return the last line as the parser sees it."""
        number = parsed.n_lines - 1
        n_old = sum(container.line < number for container in parsed.path)
        kind, begins, is_in_block = parsed.kind, parsed.first >= number, parsed.end > number
        text = parsed.content.removesuffix("\n").rpartition("\n")[2]
        whole = is_in_block and kind in {BlockKind.FENCE, BlockKind.VERBATIM}
        if not line.strip("> \t") and not whole and n_old == len(parsed.path):
            return BlockLine(BlockKind.BLANK, self._after_blank(line), len(self._path))
        if not is_in_block:
            return BlockLine(BlockKind.NOTHING, parsed.path, n_old)
        if kind is BlockKind.FENCE and not begins:
            kind = BlockKind.CODE if parsed.content else BlockKind.FENCE_END
        elif kind is BlockKind.FENCE:
            text = parsed.token.info.strip()
        elif kind is BlockKind.HEADING and parsed.token.markup in {"=", "-"}:
            kind = BlockKind.UNDERLINE
        elif kind is BlockKind.TABLE and not begins:
            kind = BlockKind.ROW
        elif parsed.token.type == "code_block":
            text = "    " + text
        elif kind is BlockKind.TEXT:
            text = _leading_blanks(line, text, parsed.path, n_old) + text if begins else text
            text += line[len(line.rstrip()) :]  # two blanks may be a line break
        cells = parsed.cells[-len(parsed.right) :]
        return BlockLine(kind, parsed.path, n_old, begins, text, parsed.token.markup, cells, parsed.right)

    def _after_blank(self, line: str) -> tuple[Container, ...]:
        """Return the containers that an empty line leaves open: items, and quotes as far as it has their marks."""
        n_quotes, path = line.count(">"), []
        for container in self._path:
            n_quotes -= not container.marker
            if n_quotes < 0:
                break
            path.append(container)
        return tuple(path)


def _leading_blanks(line: str, text: str, path: Sequence[Container], n_old: int) -> str:
    """Return the blanks that markdown-it strips from a paragraph's first line; a single one is no indentation."""
    if n_old < len(path) or any(container.marker for container in path):
        return ""
    before = line[: len(line.rstrip()) - len(text)]
    blanks = before.rpartition(">")[2].removeprefix(" " if path else "")
    return blanks if len(blanks) > 1 else ""


def _without_text(line: str, number: int, parsed: _Parsed) -> str:
    """Return a line that opens the same containers, with no open block in them."""
    start = parsed.begins.get(number, 0)
    if parsed.end <= number and _EMPTY_MARKERS.fullmatch(line[start:]):
        return line.rstrip() + " #"
    return line[:start] + "#"


def _left_open(found: BlockLine) -> BlockKind:
    """Return the kind of the block that continues after a line; BLANK for none."""
    kind = {BlockKind.CODE: BlockKind.FENCE, BlockKind.ROW: BlockKind.TABLE}.get(found.kind, found.kind)
    if kind is BlockKind.FORMULA:
        text = found.text.strip()
        text = text[formula_begins(text) if found.begins else 0 :]
        return BlockKind.BLANK if any(closing in text for closing in CLOSING.values()) else kind
    return kind if kind in _CONTINUES else BlockKind.BLANK


def _parse(lines: Sequence[str]) -> _Parsed:
    tokens: list[Token] = []
    path: list[Container] = []
    parsed, md = _Parsed(len(lines)), block_parser()
    md.block.parse("\n".join([*lines, ""]), md, {"begins": parsed.begins}, tokens)
    for index, token in enumerate(tokens):
        first, end = token.map or (0, 0)
        if token.type in {"blockquote_open", "list_item_open"}:
            path.append(Container(token.info + token.markup if token.type == "list_item_open" else "", first))
            parsed.path, parsed.kind, parsed.end = tuple(path), BlockKind.NOTHING, 0
        elif token.type in {"blockquote_close", "list_item_close"}:
            path.pop()
        elif token.type in _LEAVES:
            parsed.path, parsed.kind, parsed.token = tuple(path), _LEAVES[token.type], token
            parsed.first, parsed.end, parsed.cells, parsed.right = first, end, [], []
            parsed.content = token.content or (tokens[index + 1].content if token.nesting else "")
        elif token.type in {"th_open", "td_open"}:
            parsed.cells.append(tokens[index + 1].content)
            if token.type == "th_open":
                parsed.right.append(token.attrs.get("style") == "text-align:right")
    return parsed


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


_NAME = re.compile(r"[A-Za-z0-9_+#.-]{1,30}")
_GREEN, _CYAN, _BLUE, _MAGENTA = (Style(color=name) for name in ("green", "cyan", "blue", "magenta"))
_COMMENT = Style(dim=True)
_THEME = ANSISyntaxTheme(
    {
        Comment: _COMMENT,
        Comment.Preproc: _MAGENTA,
        Keyword: _MAGENTA,
        Keyword.Constant: _CYAN,
        Keyword.Type: _CYAN,
        Literal.String: _GREEN,
        Literal.String.Escape: _CYAN,
        Literal.String.Interpol: _CYAN,
        Literal.Number: _CYAN,
        Name.Function: _BLUE,
        Name.Class: _BLUE,
        Name.Tag: _BLUE,
        Name.Attribute: Style(color="yellow"),
        Name.Decorator: Style(color="yellow"),
        Name.Builtin: _CYAN,
        Operator.Word: _MAGENTA,
        Generic.Deleted: Style(color="red"),
        Generic.Inserted: _GREEN,
        Generic.Heading: Style(bold=True),
        Generic.Subheading: _BLUE,
        Generic.Prompt: Style(dim=True),
    }
)


class Highlighter:
    """The highlighting of one code block.

    Args:
        language: as the block names it; code in an unknown one stays plain.
    """

    def __init__(self, language: str) -> None:
        self._lexer = _lexer(language.lower()) if _NAME.fullmatch(language) else None
        self._states = ["root"]
        self._in_comment = False  # of several lines, which many lexers know only as a whole

    def line(self, code: str) -> Text:
        """Return the next line, without its newline, in colour."""
        if self._lexer is None or len(code) > MAX_LINE:  # patterns of lexers may take quadratic time
            return Text(code)
        start = 0
        if self._in_comment:
            end = code.find("*/")
            start, self._in_comment = (end + 2, False) if end >= 0 else (len(code), True)
        text = Text.assemble((code[:start], _COMMENT))
        for kind, value in self._tokens(self._lexer, code[start:] + "\n"):
            at = len(text)
            text.append(value.replace("\n", ""), _THEME.get_style_for_token(kind))
            opened = code.rfind("/*", at, len(text) + 1)
            if opened >= 0 and "*/" not in code[opened:] and self._forgets(kind):
                self._in_comment = True
                return Text.assemble(text[:opened], (code[opened:], _COMMENT))
        return text if text.plain == code else Text(code)  # some lexers lose or add text

    def _forgets(self, kind: Any) -> bool:
        """Return whether this token opens a comment that the lexer will have forgotten in the next line."""
        if kind in Comment.Multiline:
            return "comment" not in self._states[-1]
        return any(kind in one for one in (Operator, Punctuation, Error))

    def _tokens(self, lexer: Any, line: str) -> Iterable[tuple[Any, str]]:
        if not isinstance(lexer, RegexLexer) or isinstance(lexer, ExtendedRegexLexer):
            return ((kind, value) for _, kind, value in lexer.get_tokens_unprocessed(line))
        context = LexerContext(line, 0, self._states)  # the lexer leaves its states there
        try:
            return [token[1:] for token in ExtendedRegexLexer.get_tokens_unprocessed(lexer, context=context)]
        except TypeError:  # a rule of this lexer has no context
            self._lexer = None
            return []


@lru_cache(maxsize=32)
def _lexer(language: str) -> Any:
    try:
        return find_lexer_class_by_name(language)()
    except ClassNotFound:
        return None


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
        self._has_label = False  # it is a line with a label, which no other line joins
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
        if (
            line.kind is BlockKind.TEXT
            and not (line.begins or self._has_label or _LABEL.match(line.text.strip()))
            and self._inline
        ):
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
            indented, self._has_label = line.text.startswith(" " * INDENTED), bool(_LABEL.match(line.text.strip()))
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
        return Inline(styled=self._styled, formulas=self._formulas, style=style, indented=indented)

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

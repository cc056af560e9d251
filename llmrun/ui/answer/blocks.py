"""The Markdown block of each line, parsed by markdown-it from that line and the open blocks above it.

Owns the block structure of text that comes line by line; must not know rendering. The open blocks are stored as the
shortest Markdown that opens them again: one line for each open quote and item, and the beginning of the open block. So
a line costs the same everywhere in an answer.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markdown_it.token import Token

from llmrun.ui.answer.formula import CLOSING, formula_begins
from llmrun.ui.answer.parser import FORMULA, block_parser

# A longer line of code is shown as it comes, without colours.
MAX_LINE = 400
_MAX_HELD = 20  # lines

_EMPTY_MARKERS = re.compile(r"(?:[-+*>]|\d{1,9}[.)]|\s)*")
_DEFINITION = re.compile(r"\[(?:[^\[\]\\]|\\.){0,999}(?:\\?\Z|\](?:\Z|:))", re.DOTALL)
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
    NOTHING = enum.auto()  # a marker without text, a definition


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
    references: dict[str, Any]
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
        self.references: dict[str, Any] = {}  # link definitions, as markdown-it stores them
        self._open: list[str] = []  # lines that reopen the open blocks
        self._closed: list[str] = []  # the same lines, their blocks closed and their containers open
        self._path: tuple[Container, ...] = ()
        self._kind = BlockKind.BLANK  # of the open block
        self._held: list[str] = []  # possible headings of a table, or a definition

    def early(self, line: str) -> BlockLine | None:
        """Take the beginning of a line if it is certainly text of a paragraph, or a very long line of code."""
        in_code = self._kind in {BlockKind.FENCE, BlockKind.VERBATIM}
        waits = self._held or self._kind in {BlockKind.TABLE, BlockKind.FORMULA} or (in_code and len(line) <= MAX_LINE)
        if waits or _UNDECIDED.match(line.strip()):
            return None
        parsed = _parse([*self._open, line], self.references)
        found = self._found(parsed, line)
        if len(line) > MAX_LINE and found.kind in {BlockKind.CODE, BlockKind.VERBATIM}:
            return self._follow(parsed, [line])
        text = found.text.strip()
        if found.kind is not BlockKind.TEXT or _UNDECIDED.match(text) or (found.begins and _DEFINITION.match(text)):
            return None
        return self._follow(parsed, [line])

    def take(self, line: str) -> list[BlockLine]:
        """Take a complete line; return it after the lines that waited for it."""
        lines, n_open = [*self._held, line], len(self._open)
        parsed = _parse([*self._open, *lines], self.references)
        if self._held and parsed.kind is BlockKind.TABLE and parsed.first == n_open:
            self._held = []
            return [self._follow(parsed, lines)]
        text = lines[0][parsed.begins.get(n_open, 0) :]
        continues = parsed.kind is BlockKind.NOTHING or (
            parsed.kind is BlockKind.TEXT and parsed.end == n_open + len(lines)
        )
        may_define = continues and parsed.first in {0, n_open} and _DEFINITION.match(text) and line.strip()
        may_be_table = not self._held and parsed.kind is BlockKind.TEXT and text.startswith("|")
        if may_be_table or (may_define and len(lines) < _MAX_HELD):
            self._held = lines
            return []
        return [*self.flush(), *self.take(line)] if self._held else [self._follow(parsed, lines)]

    def flush(self) -> list[BlockLine]:
        """Return the waiting lines as definitions, then text."""
        held, self._held = self._held, []
        parsed = _parse([*self._open, *held], self.references)
        n_defined = max(parsed.first - len(self._open), 0) if parsed.kind is BlockKind.TEXT else len(held)
        parts = [held[:n_defined], *([line] for line in held[n_defined:])]
        return [self._follow(_parse([*self._open, *part], self.references), part) for part in parts if part]

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
        self.references.update(parsed.references)
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


def _parse(lines: Sequence[str], references: dict[str, Any]) -> _Parsed:
    tokens: list[Token] = []
    path: list[Container] = []
    parsed = _Parsed(len(lines), dict(references))
    md, env = block_parser(), {"references": parsed.references, "begins": parsed.begins}
    md.block.parse("\n".join([*lines, ""]), md, env, tokens)
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

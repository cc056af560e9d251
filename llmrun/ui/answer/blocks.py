"""Which block a line belongs to, told by markdown-it from that line and what is open above it.

Owns the block structure of a text that comes line by line; must not know how blocks look. What is open is kept as the
shortest Markdown that opens it again: one line for each quote and item that is not closed, and the begin of the open
block. So a line costs the same wherever in an answer it comes.
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
_MAX_HELD = 20  # lines that may be waited for at once

_EMPTY_MARKERS = re.compile(r"(?:[-+*>]|\d{1,9}[.)]|\s)*")
_DEFINITION = re.compile(r"\[(?:[^\[\]\\]|\\.){0,999}(?:\\?\Z|\](?:\Z|:))", re.DOTALL)
# Begins of lines that may still become something else than a paragraph's text.
_UNDECIDED = re.compile(
    r"(?:[-_*](?:[-_* \t])*|\+|#{1,6}|=+[ \t]*|\d{1,9}[.)]?|[`~]{1,2}|\\|\$|)\Z|[`~]{3}|\||<[A-Za-z/!?]|<\Z|\\\[|\$\$"
)


class BlockKind(enum.Enum):
    """What a line is."""

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


# Blocks that go on in the next line, but for a paragraph all in whole lines.
_GOES_ON = {BlockKind.TEXT, BlockKind.FENCE, BlockKind.VERBATIM, BlockKind.FORMULA, BlockKind.TABLE}
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
    """A quote, or an item of a list.

    Attributes:
        marker: "-" or "12." of an item, "" of a quote.
        line: which of the lines that are parsed together opened it.
    """

    marker: str
    line: int


@dataclass(frozen=True, slots=True)
class BlockLine:
    """A line whose kind is known.

    Attributes:
        path: the containers it is in, the outermost first.
        n_old: how many of them lines before it were in as well.
        begins: the line begins its block.
        text: without the marks of blocks; leading blanks stay.
        mark: "##" of a heading, "=" of an underline.
        cells: of a table's row.
        right: of a table, whether each column's cells end on its right.
    """

    kind: BlockKind
    path: tuple[Container, ...]
    n_old: int
    begins: bool = True
    text: str = ""
    mark: str = ""
    cells: Sequence[str] = ()
    right: Sequence[bool] = ()


@dataclass(slots=True)
class _Parsed:
    """What markdown-it says of some lines: their last block, from its first line to before its end, and what it is in.

    Attributes:
        begins: line -> where its text begins, behind the markers of containers.
    """

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
    begins: dict[int, int] = field(default_factory=dict)


class Blocks:
    """The block structure of one text.

    Attributes:
        references: definitions of links that have come, as markdown-it keeps them.
    """

    def __init__(self) -> None:
        self.references: dict[str, Any] = {}
        self._open: list[str] = []  # lines that open again what is open
        self._closed: list[str] = []  # the same lines, their blocks closed and their containers open
        self._path: tuple[Container, ...] = ()
        self._kind = BlockKind.BLANK  # of the open block
        self._held: list[str] = []  # lines that may be a table's headings or a definition

    def early(self, line: str) -> BlockLine | None:
        """The begin of a line, if it is text of a paragraph for sure, or too much code; then it counts as taken."""
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
        """A complete line. Gives what it is, after the lines that waited for it."""
        lines, n_open = [*self._held, line], len(self._open)
        parsed = _parse([*self._open, *lines], self.references)
        if self._held and parsed.kind is BlockKind.TABLE and parsed.first == n_open:
            self._held = []
            return [self._follow(parsed, lines)]
        text = lines[0][parsed.begins.get(n_open, 0) :]
        goes_on = parsed.kind is BlockKind.NOTHING or (
            parsed.kind is BlockKind.TEXT and parsed.end == n_open + len(lines)
        )
        may_define = goes_on and parsed.first in {0, n_open} and _DEFINITION.match(text) and line.strip()
        may_be_table = not self._held and parsed.kind is BlockKind.TEXT and text.startswith("|")
        if may_be_table or (may_define and len(lines) < _MAX_HELD):
            self._held = lines
            return []
        return [*self.flush(), *self.take(line)] if self._held else [self._follow(parsed, lines)]

    def flush(self) -> list[BlockLine]:
        """The lines that wait, when what they waited for does not come: definitions, then text."""
        held, self._held = self._held, []
        parsed = _parse([*self._open, *held], self.references)
        n_defined = max(parsed.first - len(self._open), 0) if parsed.kind is BlockKind.TEXT else len(held)
        parts = [held[:n_defined], *([line] for line in held[n_defined:])]
        return [self._follow(_parse([*self._open, *part], self.references), part) for part in parts if part]

    def _follow(self, parsed: _Parsed, new: list[str]) -> BlockLine:
        """Keep what is open after lines that were parsed. Gives what the last of them is."""
        found = self._found(parsed, new[-1])
        lines, n_open = [*self._open, *new], len(self._open)
        closed = [*self._closed, *(_without_text(line, n_open + index, parsed) for index, line in enumerate(new))]
        self._kind = _left_open(found)
        n_kept = {BlockKind.BLANK: 0, BlockKind.TABLE: 2}.get(self._kind, 1)
        begin = set(range(parsed.first, parsed.first + n_kept))
        order = sorted({container.line for container in found.path} | begin)
        self._open = [lines[index] if index in begin else closed[index] for index in order]
        self._closed = [closed[index] for index in order]
        self._path = tuple(Container(one.marker, order.index(one.line)) for one in found.path)
        self.references.update(parsed.references)
        return found

    def _found(self, parsed: _Parsed, line: str) -> BlockLine:
        """What the parser says of the last line."""
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
        """The containers that an empty line leaves open: items, and quotes as far as it has their marks."""
        n_quotes, kept = line.count(">"), []
        for container in self._path:
            n_quotes -= not container.marker
            if n_quotes < 0:
                break
            kept.append(container)
        return tuple(kept)


def _leading_blanks(line: str, text: str, path: Sequence[Container], n_old: int) -> str:
    """The blanks that markdown-it takes from a paragraph's first line; one alone is no indentation."""
    if n_old < len(path) or any(container.marker for container in path):
        return ""
    before = line[: len(line.rstrip()) - len(text)]
    blanks = before.rpartition(">")[2].removeprefix(" " if path else "")
    return blanks if len(blanks) > 1 else ""


def _without_text(line: str, number: int, parsed: _Parsed) -> str:
    """A line that opens the same containers, and in them nothing that goes on."""
    begun = parsed.begins.get(number, 0)
    if parsed.end <= number and _EMPTY_MARKERS.fullmatch(line[begun:]):
        return line.rstrip() + " #"
    return line[:begun] + "#"


def _left_open(found: BlockLine) -> BlockKind:
    """The kind of the block that goes on after a line; BLANK is none."""
    kind = {BlockKind.CODE: BlockKind.FENCE, BlockKind.ROW: BlockKind.TABLE}.get(found.kind, found.kind)
    if kind is BlockKind.FORMULA:
        text = found.text.strip()
        text = text[formula_begins(text) if found.begins else 0 :]
        return BlockKind.BLANK if any(closing in text for closing in CLOSING.values()) else kind
    return kind if kind in _GOES_ON else BlockKind.BLANK


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

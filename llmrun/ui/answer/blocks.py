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


_WHOLE_LINES = {BlockKind.FENCE, BlockKind.VERBATIM, BlockKind.FORMULA, BlockKind.TABLE}
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
    cells: tuple[str, ...] = ()
    right: tuple[bool, ...] = ()


@dataclass(slots=True)
class _Parsed:
    """What markdown-it found: the last block, what it is in, and where the text of each line begins."""

    path: tuple[Container, ...] = ()
    kind: BlockKind = BlockKind.NOTHING
    token: Token | None = None
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
        """The begin of a line, if it is text of a paragraph for sure; then it counts as taken."""
        if self._held or self._kind in _WHOLE_LINES or _UNDECIDED.match(line.strip()):
            return None
        parsed = _parse([*self._open, line], dict(self.references))
        found = self._found(parsed, line, len(self._open))
        text = found.text.strip()
        if found.kind is not BlockKind.TEXT or _UNDECIDED.match(text) or (found.begins and _DEFINITION.match(text)):
            return None
        return self._follow(parsed, found, line)

    def take(self, line: str) -> list[BlockLine]:
        """A complete line. Gives what it is, after the lines that waited for it."""
        lines = [*self._held, line]
        parsed = _parse([*self._open, *lines], dict(self.references))
        if not self._held:
            return [] if self._holds(parsed, line) else [self._taken(line)]
        first = len(self._open)
        goes_on = parsed.token is None or (parsed.token.map or [0])[0] <= len(lines) + first - 2
        if _is_bar(self._held[0], parsed, first):
            self._held = []
            return [self._taken(lines[0], lines[1])]
        if goes_on and line.strip() and _is_definition(parsed, lines, first) and len(lines) < _MAX_HELD:
            self._held = lines
            return []
        return [*self.flush(), *self.take(line)]

    def flush(self) -> list[BlockLine]:
        """The lines that wait, when what they waited for does not come."""
        held, self._held = self._held, []
        if not held:
            return []
        parsed = _parse([*self._open, *held], dict(self.references))
        n_defined = len(held)
        if parsed.token and parsed.token.map and parsed.kind is BlockKind.TEXT:
            n_defined = max(parsed.token.map[0] - len(self._open), 0)
        defined = [self._taken(*held[:n_defined])] if n_defined else []
        return [*defined, *(self._taken(line) for line in held[n_defined:])]

    def _holds(self, parsed: _Parsed, line: str) -> bool:
        """Whether the line needs the next one."""
        n_open = len(self._open)
        found = self._found(parsed, line, n_open)
        text = found.text.lstrip()
        is_table = found.kind is BlockKind.TEXT and text.startswith("|")
        begun = parsed.begins.get(n_open, 0)
        is_definition = found.begins and found.kind in {BlockKind.TEXT, BlockKind.NOTHING}
        if is_table or (is_definition and _DEFINITION.match(line[begun:])):
            self._held = [line]
        return bool(self._held)

    def _taken(self, *new: str) -> BlockLine:
        """Follow one line, or several that are one thing; gives what the last one is."""
        parsed = _parse([*self._open, *new], self.references)
        return self._follow(parsed, self._found(parsed, new[-1], len(self._open) + len(new) - 1), *new)

    def _follow(self, parsed: _Parsed, found: BlockLine, *new: str) -> BlockLine:
        """Keep what is open after lines that were parsed."""
        lines = [*self._open, *new]
        closed = [
            *self._closed,
            *(_without_text(line, number, parsed) for number, line in enumerate(new, len(self._open))),
        ]
        kept = {container.line for container in found.path}
        open_kind = _left_open(found)
        begin: set[int] = set()
        if open_kind is not BlockKind.BLANK and parsed.token and parsed.token.map:
            first = parsed.token.map[0]
            begin = {first, first + 1} if open_kind is BlockKind.TABLE else {first}
        order = sorted(kept | begin)
        self._open = [lines[index] if index in begin else closed[index] for index in order]
        self._closed = [closed[index] for index in order]
        self._path = tuple(Container(one.marker, order.index(one.line)) for one in found.path)
        self._kind = open_kind
        return found

    def _found(self, parsed: _Parsed, line: str, number: int) -> BlockLine:
        """What the parser says of the line with this number."""
        token = parsed.token
        covered = token is not None and token.map is not None and token.map[1] > number
        whole = parsed.kind in {BlockKind.FENCE, BlockKind.VERBATIM}
        n_old = sum(container.line < number for container in parsed.path)
        if not line.strip("> \t") and not (covered and whole) and n_old == len(parsed.path):
            return BlockLine(BlockKind.BLANK, self._after_blank(line), len(self._path))
        if token is None or token.map is None or not covered:
            return BlockLine(BlockKind.NOTHING, parsed.path, n_old)
        begins = token.map[0] >= number
        kind, text = parsed.kind, parsed.content.removesuffix("\n").rpartition("\n")[2]
        if kind is BlockKind.FENCE:
            kind, text = (kind, token.info.strip()) if begins else _in_fence(token)
        elif kind is BlockKind.HEADING and token.markup in {"=", "-"}:
            kind = BlockKind.UNDERLINE
        elif kind is BlockKind.TABLE:
            kind = kind if begins else BlockKind.ROW
        elif token.type == "code_block":
            text = "    " + text
        elif kind is BlockKind.TEXT:
            text = _leading_blanks(line, text, parsed.path, number) + text if begins else text
            text += line[len(line.rstrip()) :]  # two blanks may be a line break
        cells, right = tuple(parsed.cells), tuple(parsed.right)
        n_cells = len(right)
        return BlockLine(kind, parsed.path, n_old, begins, text, token.markup, cells[-n_cells:] if cells else (), right)

    def _after_blank(self, line: str) -> tuple[Container, ...]:
        """The containers that an empty line leaves open: items, and quotes as far as it has their marks."""
        n_quotes, kept = line.count(">"), []
        for container in self._path:
            n_quotes -= not container.marker
            if n_quotes < 0:
                break
            kept.append(container)
        return tuple(kept)


def _is_bar(held: str, parsed: _Parsed, number: int) -> bool:
    """Whether a line that waits turned out to be the headings of a table."""
    return parsed.kind is BlockKind.TABLE and parsed.token is not None and parsed.token.map == [number, number + 2]


def _is_definition(parsed: _Parsed, lines: Sequence[str], first: int) -> bool:
    begun = parsed.begins.get(first, 0)
    return _DEFINITION.match(lines[0][begun:]) is not None


def _in_fence(token: Token) -> tuple[BlockKind, str]:
    """A line after the one that opened the fence: of code, or the fence's end."""
    if not token.content:
        return BlockKind.FENCE_END, ""
    return BlockKind.CODE, token.content.removesuffix("\n")


def _leading_blanks(line: str, text: str, path: Sequence[Container], number: int) -> str:
    """The blanks that markdown-it takes from a paragraph's first line; one alone is no indentation."""
    if any(container.marker for container in path) or any(container.line == number for container in path):
        return ""
    before = line[: len(line.rstrip()) - len(text)]
    blanks = before.rpartition(">")[2].removeprefix(" " if path else "")
    return blanks if len(blanks) > 1 else ""


def _without_text(line: str, number: int, parsed: _Parsed) -> str:
    """A line that opens the same containers, and in them nothing that goes on."""
    begun = parsed.begins.get(number, 0)
    covered = parsed.token is not None and parsed.token.map is not None and parsed.token.map[1] > number
    if not covered and _EMPTY_MARKERS.fullmatch(line[begun:]):
        return line.rstrip() + " #"
    return line[:begun] + "#"


def _left_open(found: BlockLine) -> BlockKind:
    """The kind of the block that goes on after a line; BLANK is none."""
    kind = {BlockKind.CODE: BlockKind.FENCE, BlockKind.ROW: BlockKind.TABLE}.get(found.kind, found.kind)
    if kind is BlockKind.FORMULA and not formula_goes_on(found):
        return BlockKind.BLANK
    goes_on = {BlockKind.TEXT, BlockKind.FENCE, BlockKind.VERBATIM, BlockKind.TABLE, BlockKind.FORMULA}
    return kind if kind in goes_on else BlockKind.BLANK


def formula_goes_on(found: BlockLine) -> bool:
    """Whether the line leaves its formula open."""
    text = found.text.strip()
    opened = formula_begins(text) if found.begins else 0
    return not any(closing in text[opened:] for closing in CLOSING.values())


def _parse(lines: Sequence[str], references: dict[str, Any]) -> _Parsed:
    tokens: list[Token] = []
    parsed = _Parsed()
    env = {"references": references, "begins": parsed.begins}
    md = block_parser()
    md.block.parse("\n".join([*lines, ""]), md, env, tokens)
    path: list[Container] = []
    for index, token in enumerate(tokens):
        if token.type in {"blockquote_open", "list_item_open"}:
            marker = token.info + token.markup if token.type == "list_item_open" else ""
            path.append(Container(marker, (token.map or [0])[0]))
            parsed.path, parsed.token, parsed.kind = tuple(path), None, BlockKind.NOTHING
        elif token.type in {"blockquote_close", "list_item_close"}:
            path.pop()
        elif token.type in _LEAVES:
            parsed.path, parsed.token, parsed.kind = tuple(path), token, _LEAVES[token.type]
            parsed.content = token.content or (tokens[index + 1].content if token.nesting else "")
            parsed.cells, parsed.right = [], []
        elif token.type in {"th_open", "td_open"}:
            parsed.cells.append(tokens[index + 1].content)
            if token.type == "th_open":
                parsed.right.append(token.attrs.get("style") == "text-align:right")
    return parsed

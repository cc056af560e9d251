"""Which block of Markdown a line belongs to, told from as little of the line as possible. Pure.

Owns what begins a block and what goes on in it; must not know how blocks look. The rules are CommonMark's where a
stream allows: a line is a block of its own (poems keep their lines), a heading has no underline, a table begins with a
bar in each of its lines. Lists may be indented more carelessly than CommonMark has it, for models do.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DEPTH = 12  # of quotes and lists in each other
MAX_HELD = 4000  # characters of a line that may wait for its end
_CODE_INDENT = 4

_QUOTE = re.compile(r" {0,3}> ?")
_ITEM = re.compile(r"( *)([-*+]|\d{1,9}[.)])( +)(?=[^ ])")
_EMPTY_ITEM = re.compile(r"( *)([-*+]|\d{1,9}[.)]) *\Z")
_HEADING = re.compile(r" {0,3}(#{1,6}) +(?=[^ ])")
_EMPTY_HEADING = re.compile(r" {0,3}(#{1,6}) *\Z")
_RULE = re.compile(r" {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})\Z")
_UNDERLINE = re.compile(r" {0,3}={3,} *\Z")
_FENCE = re.compile(r" *(`{3,}|~{3,}) *([^`]*)\Z")
_DELIMITER = re.compile(r" *\|(?: *:?-+:? *\|)* *:?-+:? *\|? *\Z")

# A line that is only this far could still become something else than text.
_UNDECIDED = re.compile(
    r" *(?:\d{1,9}[.)]? *|#{1,6} *|[-+*] *|(?:- *)+|(?:\* *)+|(?:_ *)+|=+ *|`{1,2}|~{1,2}|`{3,}[^`]*|~{3,}.*|\|.*)?\Z"
)


class LineKind(enum.Enum):
    """What a line is."""

    BLANK = enum.auto()
    TEXT = enum.auto()
    HEADING = enum.auto()
    RULE = enum.auto()
    FENCE = enum.auto()
    TABLE = enum.auto()
    CODE = enum.auto()


@dataclass(frozen=True, slots=True)
class Container:
    """A quote, or an item of a list.

    Attributes:
        marker: of the item as it was written, e.g. "-" or "1."; "" is a quote.
        indent: columns that a line of the item has to be indented by.
        offset: columns before the marker.
    """

    marker: str = ""
    indent: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class BlockLine:
    """A line whose kind is known.

    Attributes:
        containers: it is in, the outermost first.
        n_old: how many of them lines before it were in as well.
        text: what comes after the marks, as far as it has come.
        mark: "##" of a heading, "```" of a fence.
    """

    kind: LineKind
    containers: tuple[Container, ...]
    n_old: int
    text: str = ""
    mark: str = ""


def parse_line(
    line: str, containers: Sequence[Container], *, complete: bool, in_text: bool = False, verbatim: bool = False
) -> BlockLine | None:
    """What a line is, or None when more of it is needed to tell.

    Args:
        line: from its beginning, without a newline.
        containers: of the line before.
        complete: no more of the line will come.
        in_text: the line before was text.
        verbatim: nothing but an empty line or a quote's mark means anything (a formula is open).
    """
    if not complete and (not line or line.isspace()):
        return None
    old = tuple(containers)
    rest, n_matched = _inside(_spaced(line), old)
    if not rest or rest.isspace():
        return BlockLine(LineKind.BLANK, old[:n_matched], n_matched) if complete else None
    if verbatim:
        return BlockLine(LineKind.TEXT, old, len(old), rest.lstrip(" "))
    opened: list[Container] = []
    while n_matched + len(opened) < MAX_DEPTH:
        found = _opened(rest, complete=complete, deep=any(one.marker for one in (*old, *opened)))
        if found is None:
            break
        opened.append(found[0])
        rest = found[1]
    stack = old[:n_matched]
    if not opened and n_matched < len(old) and in_text:
        lazy = _leaf(rest, complete=complete, code=False)
        if lazy is None or lazy.kind is LineKind.TEXT:
            return lazy and BlockLine(LineKind.TEXT, old, len(old), lazy.text)
    in_list = any(one.marker for one in (*stack, *opened))
    leaf = _leaf(rest, complete=complete, code=not in_list and not in_text)
    return leaf and BlockLine(leaf.kind, (*stack, *opened), n_matched, leaf.text, leaf.mark)


def inside_fence(line: str, containers: Sequence[Container]) -> str | None:
    """A line of code without what its containers put before it; None when it has left the quote, and so the code."""
    rest = line
    for container in containers:
        if container.marker:
            spaces = len(rest) - len(rest.lstrip(" "))
            rest = rest[min(spaces, container.indent) :]
        elif match := _QUOTE.match(rest):
            rest = rest[match.end() :]
        else:
            return None
    return rest


def closes_fence(line: str, mark: str) -> bool:
    """Whether a line of code is the end of it instead."""
    text = line.strip()
    return len(text) >= len(mark) and not text.strip(mark[0])


def is_delimiter(text: str) -> bool:
    """Whether a line is the one below a table's headings."""
    return _DELIMITER.match(text) is not None


def _spaced(line: str) -> str:
    """The line with the tabs before its text as spaces."""
    text = line.lstrip(" \t")
    return line[: len(line) - len(text)].expandtabs(4) + text


def _inside(line: str, containers: Sequence[Container]) -> tuple[str, int]:
    """The line without what says that it is in these containers, and in how many of them it is."""
    for n_matched, container in enumerate(containers):
        if not container.marker:
            match = _QUOTE.match(line)
            if not match:
                return line, n_matched
            line = line[match.end() :]
        elif line.startswith(" " * container.indent):
            line = line[container.indent :]
        elif _is_carelessly_inside(line, container):
            line = line.lstrip(" ")
        elif line.strip(" "):
            return line, n_matched
    return line, len(containers)


def _is_carelessly_inside(line: str, item: Container) -> bool:
    """Models put two or three spaces before an item below "10. ", where four are due."""
    match = _ITEM.match(line) or _EMPTY_ITEM.match(line)
    return match is not None and len(match[1]) >= item.offset + 2


def _opened(rest: str, *, complete: bool, deep: bool) -> tuple[Container, str] | None:
    """The quote or item that begins here, and what is in it; None when none does, or not for sure."""
    if match := _QUOTE.match(rest):
        return Container(), rest[match.end() :]
    if _RULE.match(rest):
        return None
    match = _ITEM.match(rest) or (_EMPTY_ITEM.match(rest) if complete else None)
    if not match or (len(match[1]) >= _CODE_INDENT and not deep):
        return None
    if not complete and _UNDECIDED.match(rest):
        return None
    spaces = len(match[3]) if match.lastindex == 3 else 1
    taken = len(match[1]) + len(match[2]) + (spaces if spaces <= _CODE_INDENT else 1)
    return Container(match[2], taken, len(match[1])), rest[taken:]


def _leaf(rest: str, *, complete: bool, code: bool) -> BlockLine | None:
    """What a line without its containers is; None when that needs more of it."""
    indent = len(rest) - len(rest.lstrip(" "))
    if code and indent >= _CODE_INDENT and indent < len(rest):
        return BlockLine(LineKind.CODE, (), 0, rest[_CODE_INDENT:])
    if len(rest) > MAX_HELD or not _UNDECIDED.match(rest):
        heading = _HEADING.match(rest)
        if heading:
            return BlockLine(LineKind.HEADING, (), 0, rest[heading.end() :], heading[1])
        return BlockLine(LineKind.TEXT, (), 0, rest.lstrip(" "))
    if not complete:
        return None
    if not rest.strip(" "):
        return BlockLine(LineKind.TEXT, (), 0)  # of an empty item or quote
    if _RULE.match(rest) or _UNDERLINE.match(rest):
        return BlockLine(LineKind.RULE, (), 0)
    if fence := _FENCE.match(rest):
        return BlockLine(LineKind.FENCE, (), 0, fence[2], fence[1])
    if rest.lstrip(" ").startswith("|"):
        return BlockLine(LineKind.TABLE, (), 0, rest.strip(" "))
    if heading := _EMPTY_HEADING.match(rest):
        return BlockLine(LineKind.HEADING, (), 0, "", heading[1])
    return BlockLine(LineKind.TEXT, (), 0, rest.lstrip(" "))

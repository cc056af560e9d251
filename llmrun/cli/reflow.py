"""Help topics, written for 80 columns, wrapped for a terminal of another width.

Pure. Paragraphs and texts beside terms are wrapped. Indented lines without a term are examples: they keep their lines,
so that they can be copied. So do indented lines that begin with |, the output of a command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import zip_longest

from llmrun.ui.terminal.cells import wrapped

_WRITTEN = 80
_WIDEST = 100  # longer rows are hard to read
_LEAST_TEXT = 24  # cells beside a term; with less it stands below
_TERM = re.compile(r"( *)([^\s|](?:.*?\S)?)  +(?=\S)")  # a row that begins with | is output of a command
_NUMBERED = re.compile(r"\d+  ")  # an item of a list beside a term


@dataclass(slots=True)
class _Entry:
    """A paragraph, or a term with the text beside it."""

    indent: int
    column: int
    texts: list[str]
    terms: list[str] = field(default_factory=list)

    def lines(self, columns: int) -> list[str]:
        text, margin = " ".join(self.texts), " " * self.indent
        if not self.terms and self.indent:
            return [(margin if self.indent <= columns // 3 else "    ") + text]
        room = columns - self.column
        if room >= min(len(text), _LEAST_TEXT):
            pairs = zip_longest(self.terms, wrapped(text, room), fillvalue="")
            return [f"{margin + term:<{self.column}}{row}".rstrip() for term, row in pairs]
        return [
            margin + " ".join(self.terms),
            *(f"{margin}  {row}" for row in wrapped(text, columns - self.indent - 2)),
        ]


def reflow(text: str, columns: int) -> str:
    """Return the text in rows of at most `columns`; 0, for a pipe, leaves the text as it is."""
    if columns in (0, _WRITTEN):
        return text
    width, shown = min(columns, _WIDEST), list[str]()
    entry: _Entry | None = None
    previous = ""
    for line in [*text.split("\n"), ""]:
        if entry is not None and _goes_on(entry, previous, line):
            entry.texts.append(line[entry.column :].strip())
            entry.terms += filter(None, [line[: entry.column].strip()])
        else:
            shown += entry.lines(width) if entry else []
            entry = _entry(line) if line.strip() else None
            shown += [] if entry else [""]
        previous = line
    return "\n".join(shown[:-1])


def _entry(line: str) -> _Entry:
    indent = len(line) - len(line.lstrip())
    if found := _TERM.match(line):
        return _Entry(indent, found.end(), [line[found.end() :]], [found[2]])
    return _Entry(indent, indent, [line.strip()])


def _goes_on(entry: _Entry, previous: str, line: str) -> bool:
    """Return whether a line continues the previous one."""
    rest, left = line[entry.column :], line[: entry.column]
    if not rest.strip() or rest[0] == " " or _NUMBERED.match(rest):
        return False
    if not entry.terms:
        return entry.indent == 0 and not _TERM.match(line)
    if not left.strip():
        return True
    # Otherwise it is the rest of a term, whose text goes on too, or the next term.
    is_full = len(previous) <= _WRITTEN < len(previous) + 1 + len(rest.split()[0])
    is_beside = len(entry.texts) == 1 and left.endswith("  ") and len(left) - len(left.lstrip()) == entry.indent
    return is_full and is_beside and not left.strip().startswith(("-", "llmrun"))

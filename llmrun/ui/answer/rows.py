"""Streamed text in rows after a prefix, wrapped at words; output is never taken back."""

from __future__ import annotations

import re

from rich.color import ColorSystem
from rich.style import Style
from rich.text import Text

from llmrun.ui.terminal.cells import JOINER, width

_WIDE = (
    "\\u1100-\\u115f\\u2e80-\\u303e\\u3041-\\ua4cf\\uac00-\\ud7a3\\uf900-\\ufaff\\ufe30-\\ufe6f"
    "\\uff00-\\uff60\\uffe0-\\uffe6\\U0001f300-\\U0001faff\\U00020000-\\U0003fffd"
)
_NEVER_FIRST = "、。，．・：；？！）」』】》〉”’…ー々％\u0300-\u036f\u200d\ufe00-\ufe0f\U0001f3fb-\U0001f3ff"
# Never broken: a word with the blanks before it, or a wide character with its marks and what is joined to it.
ATOM = re.compile(rf"\s*(?:[^\s{_WIDE}]+|[{_WIDE}])(?:(?<={JOINER})[{_WIDE}]|[{_NEVER_FIRST}])*|\s+\Z")

_EMOJI = "\ufe0f"  # the character before it is an emoji: one cell in some terminals, two in others


class RowWriter:
    """A writer of texts, each in rows of its own.

    Args:
        styled: write styles.
    """

    def __init__(self, *, styled: bool = True) -> None:
        self._styled = styled
        self._rest = Text()
        self._column = 0  # cells since our last line break
        self._fresh = True  # the row has only the prefix

    def begin(self, first: Text, rest: Text) -> str:
        """Start a text; return the prefix of its first row.

        A row that is broken here ends with a newline and has no blanks at its end, so that a copy from the terminal is
        the text but for line breaks, also after a resize. A word that is too long is left to the terminal to wrap.
        """
        self._rest, self._fresh, self._column = rest, True, width(first.plain)
        return self.painted(first)

    def add(self, text: Text, columns: int) -> str:
        """Add whole words; return their output.

        Args:
            columns: limit of a row; the terminal has one more.
        """
        if "\n" not in text.plain:
            return self._wrapped(text, columns)
        out = []
        for number, line in enumerate(text.split("\n", allow_blank=True)):
            out += [self._next_row() if number else "", self._wrapped(line, columns)]
        return "".join(out)

    def painted(self, text: Text) -> str:
        """Return the text with the escapes of its styles."""
        if not self._styled or not (text.spans or text.style):
            return text.plain
        out, end = [], 0
        for span in text.spans:
            out += [text.plain[end : span.start], _painted(text.plain[span.start : span.end], span.style)]
            end = span.end
        return "".join(out) + _painted(text.plain[end:], text.style)

    def _next_row(self) -> str:
        self._column, self._fresh = width(self._rest.plain), True
        return "\n" + self.painted(self._rest)

    def _wrapped(self, text: Text, columns: int) -> str:
        cuts = []
        for match in ATOM.finditer(text.plain):
            cells, word = width(match[0]) + match[0].count(_EMOJI), match[0].lstrip()
            if word and not self._fresh and self._column + cells > columns:
                cuts += [match.start(), match.end() - len(word)]  # the blanks between are dropped
                cells -= width(match[0]) - width(word)
                self._column = width(self._rest.plain)
            longer = self._column + cells
            self._column = (longer - 1) % (columns + 1) + 1 if longer else 0
            self._fresh = False
        first, *others = text.divide(cuts)[::2] if cuts else [text]
        gap = "\n" + self.painted(self._rest)
        return self.painted(first) + "".join([gap + self.painted(row) for row in others])


def _painted(text: str, style: str | Style) -> str:
    return style.render(text, color_system=ColorSystem.STANDARD) if isinstance(style, Style) and text else text

"""Wraps styled text at words while it comes, and takes nothing back that it gave out.

Owns where rows break; must not know Markdown or the terminal. A word is given out when it is known to have ended, so
what has come out depends on the text so far and not on the pieces it came in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmrun.ui.terminal.ansi import Span, paint
from llmrun.ui.terminal.cells import JOINER, SKIN_TONES, advance, char_width, width

# A word that is longer is given out in parts, so that text without spaces can't be held back for ever.
MAX_WORD = 256

# Blanks, text without wide characters, and single characters that may be wide.
_ATOM = re.compile(r"[ \t]+|[!-\u10ff]+|[^ \t!-\u10ff]")
_NEVER_FIRST = "、。，．・：；？！）」』】》〉”’…ー々％"


class Wrapper:
    """One line of text after the other, each wrapped into rows below its prefix.

    Args:
        styled: whether styles are shown at all.
    """

    def __init__(self, *, styled: bool = True) -> None:
        self._styled = styled
        self._rest: Sequence[Span] = ()
        self._column = 0  # cells since the last line break of ours
        self._at_row_start = True  # nothing but the prefix is in the row
        self._space: Span = ("", "")
        self._word: list[Span] = []
        self._n_chars = 0  # of the word
        self._last = ""  # character of the word
        self._overlong = False  # a part of the word is out already

    def begin(self, first: Sequence[Span], rest: Sequence[Span]) -> str:
        """Start a line.

        Args:
            first: what its first row begins with.
            rest: what its other rows begin with.
        """
        self._rest = rest
        self._space, self._last, self._at_row_start = ("", ""), "", True
        return self._prefix(first)

    def add(self, text: str, style: str, columns: int) -> str:
        """More of the line. Gives what can be shown of it now.

        Args:
            text: without newlines.
            columns: that a row may take; the terminal should have one more.
        """
        out = []
        for atom in _ATOM.findall(text):
            if atom[0] in " \t":
                out.append(self._place(columns))
                self._space = (self._space[0] + " " * len(atom), style)
                continue
            n_marks = next((index for index, char in enumerate(atom) if char_width(char)), len(atom))
            self._push(atom[:n_marks], style)  # they belong to the character before them
            atom = atom[n_marks:]
            if atom and self._may_break_before(atom[0]):
                out.append(self._place(columns))
            while self._n_chars + len(atom) > MAX_WORD:
                room = MAX_WORD - self._n_chars
                self._push(atom[:room], style)
                out.append(self._place(columns, goes_on=True))
                atom = atom[room:]
            self._push(atom, style)
        return "".join(out)

    def end(self, columns: int) -> str:
        """The rest of the line, its line break included."""
        return self._place(columns) + "\n"

    def _may_break_before(self, char: str) -> bool:
        """Between words there is a space; beside a wide character a row may break without."""
        if not self._last:
            return False
        cells = char_width(char)
        if char in SKIN_TONES or char in _NEVER_FIRST or self._last == JOINER:
            return False
        return cells == 2 or char_width(self._last) == 2

    def _push(self, text: str, style: str) -> None:
        if not text:
            return
        if self._word and self._word[-1][1] == style:
            self._word[-1] = (self._word[-1][0] + text, style)
        else:
            self._word.append((text, style))
        self._n_chars += len(text)
        self._last = next((char for char in reversed(text) if char == JOINER or char_width(char)), self._last)

    def _place(self, columns: int, *, goes_on: bool = False) -> str:
        """Give out the word, on this row or the next."""
        if not self._word:
            self._overlong = self._overlong and goes_on
            return ""
        space, cells = self._space[0], sum(width(text) for text, _ in self._word)
        fits = self._column + len(space) + cells <= columns
        if self._overlong or fits or self._at_row_start:
            space = "" if self._overlong else space[: max(columns - self._column, 0)]
            self._column += len(space)
            out = self._painted([(space, self._space[1]), *self._word])
        else:
            out = "\n" + self._prefix(self._rest) + self._painted(self._word)
        # A word that is wider than the row is the terminal's to wrap, so that a long address can still be copied.
        self._column = advance(min(self._column, columns), "".join(text for text, _ in self._word), columns + 1)
        self._at_row_start, self._overlong = False, goes_on
        self._space, self._word, self._n_chars = ("", ""), [], 0
        self._last = self._last if goes_on else ""
        return out

    def _prefix(self, spans: Sequence[Span]) -> str:
        self._column = sum(width(text) for text, _ in spans)
        return self._painted(spans)

    def _painted(self, spans: Sequence[Span]) -> str:
        if len(spans) > 1 and spans[0][1] == spans[1][1]:  # a space and its word
            spans = [(spans[0][0] + spans[1][0], spans[0][1]), *spans[2:]]
        return "".join([paint(text, style) if self._styled else text for text, style in spans])

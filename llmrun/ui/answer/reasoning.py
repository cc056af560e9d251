"""Streamed reasoning as dim rows beside a bar."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text

from llmrun.ui.answer.rows import ATOM, RowWriter

FOLD_CHARACTERS = 240

_DIM = Style(dim=True)


class ReasoningRows:
    """Dim lines beside a bar, and a note at their end.

    Args:
        lines: maximum number of lines, of FOLD_CHARACTERS together; None for no limit.
    """

    def __init__(self, lines: int | None, *, styled: bool, unicode: bool) -> None:
        self._lines_left = lines
        self._characters_left = FOLD_CHARACTERS
        self._unicode = unicode
        self._rows = RowWriter(styled=styled)
        self._bar = Text("│ " if unicode else "| ", _DIM)
        self._held = ""  # an incomplete word
        self._open = False  # inside a line
        self._blank = self._any = False

    def feed(self, text: str, columns: int) -> str:
        """Add text; return the new rows."""
        if self._lines_left == 0:
            return ""
        *lines, rest = (self._held + text).split("\n")
        out = [self._words(line, columns) + self._line_end() for line in lines]
        *words, self._held = ATOM.findall(rest) or [""]
        return "".join([*out, self._words("".join(words), columns)])

    def end(self, columns: int, note: str) -> str:
        """Return the rest of the rows, and the note."""
        out = self._words(self._held, columns) + self._line_end()
        self._held = ""
        return f"{out}{self._rows.painted(Text(note, _DIM))}\n"

    def _words(self, text: str, columns: int) -> str:
        """Return whole words of one line."""
        out = []
        for word in ATOM.findall(text):
            if self._lines_left == 0:
                break
            if self._open and self._lines_left is not None and self._characters_left <= 0:
                self._lines_left = 0
                out.append(
                    self._rows.add(Text(" …" if self._unicode else " ...", _DIM), columns - 1) + self._line_end()
                )
                break
            if not self._open:
                word = word.lstrip()
                out.append(self._line_begin() if word else "")
            self._characters_left -= len(word)
            out.append(self._rows.add(Text(word, _DIM), columns - 1))
        return "".join(out)

    def _line_begin(self) -> str:
        blank = (
            self._rows.begin(self._bar, self._bar).rstrip(" ") + "\n" if self._blank and not self._lines_left else ""
        )
        self._open, self._any, self._blank = True, True, False
        return blank + self._rows.begin(self._bar, self._bar)

    def _line_end(self) -> str:
        if not self._open:
            self._blank = self._any
            return ""
        self._open = False
        if self._lines_left:
            self._lines_left -= 1
        return "\n"

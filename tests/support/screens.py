"""An emulated terminal, and time that passes when told to. Not a test itself."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping

import pyte
import pyte.screens

from llmrun.ui.terminal.cells import char_width

PYTHON_WORDS = r"Traceback|(?<!')\bb'|\['|\{'|<[\w.]+ object|\bNone\b|\bnan\b"
"""What no screen shows."""


def row_text(row: Mapping[int, pyte.screens.Char]) -> str:
    """The text of a row, up to the last cell that something was written to."""
    return "".join(row[column].data for column in range(max(row, default=-1) + 1))


class CachedScreen(pyte.Screen):
    """A screen that is read after every change: only the rows that have changed become texts again."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows)
        self._texts = [""] * rows

    @property
    def display(self) -> list[str]:
        if len(self._texts) != self.lines:
            self._texts, self.dirty = [""] * self.lines, {*range(self.lines)}
        for number in self.dirty:
            self._texts[number] = row_text(self.buffer[number]).ljust(self.columns)
        self.dirty.clear()
        return self._texts


class Screen(pyte.HistoryScreen):
    """pyte, mended where it differs from real terminals: wide characters wrap whole, a tab in a full row and
    characters without width change nothing."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows, history=100_000)
        self.set_mode(pyte.modes.LNM)  # stands in for the terminal driver's ONLCR

    def draw(self, data: str) -> None:
        for char in data:
            cells = char_width(char)
            if cells == 0:
                continue
            if cells == 2 and self.cursor.x == self.columns - 1:
                self.cursor.x = self.columns
            super().draw(char)

    def tab(self) -> None:
        if self.cursor.x < self.columns:
            super().tab()

    def erase_in_display(self, how: int = 0, *args: object, **options: object) -> None:
        if how == 0 and (self.cursor.x, self.cursor.y) == (
            0,
            0,
        ):  # tmux keeps in its history what this erases
            rows = self.rows_shown()
            self.history.top.extend(self.buffer[index].copy() for index, row in enumerate(rows) if row)
        super().erase_in_display(how, *args, **options)

    def restore_cursor(self) -> None:
        assert self.savepoints, "restore without save"
        super().restore_cursor()

    def scrollback(self) -> list[str]:
        return [row_text(row).rstrip() for row in self.history.top]

    def rows_shown(self) -> list[str]:
        return [row_text(self.buffer[index]).rstrip() for index in range(self.lines)]

    def everything(self) -> list[str]:
        rows = [*self.scrollback(), *self.rows_shown()]
        while rows and not rows[-1]:
            rows.pop()
        return rows


class ReflowingScreen(Screen):
    """A screen that wraps its rows anew when its width changes, as kitty, foot, GNOME Terminal and Windows Terminal do.

    A row that the terminal wrapped by itself continues in the next one, in a copy too; cells that nothing was written
    to are no blanks.
    """

    def draw(self, data: str) -> None:
        for char in data:
            cells = char_width(char)
            wraps = self.cursor.x + cells > self.columns and cells > 0 and pyte.modes.DECAWM in self.mode
            row = self.buffer[self.cursor.y]
            if wraps:
                row.continues = True
            elif cells:
                row.continues = False
            super().draw(char)

    def erase_in_line(self, how: int = 0, *args: object, **options: object) -> None:
        super().erase_in_line(how, *args, **options)
        row = self.buffer[self.cursor.y]
        first, end = {0: (self.cursor.x, self.columns), 1: (0, self.cursor.x + 1), 2: (0, self.columns)}[how]
        for column in range(first, end):
            row.pop(column, None)
        row.continues = False

    def erase_in_display(self, how: int = 0, *args: object, **options: object) -> None:
        assert how == 0, "nothing else is used by views"
        super().erase_in_display(how, *args, **options)
        self.erase_in_line(0)
        for number in range(self.cursor.y + 1, self.lines):
            self.buffer.pop(number, None)

    def _lines(self) -> tuple[list[list[pyte.screens.Char]], tuple[int, int]]:
        """Lines of cells as the program wrote them, and the cursor's line and cell."""
        blank = self.default_char
        rows = [*self.history.top, *(self.buffer[number] for number in range(self.lines))]
        n_history = len(self.history.top)
        lines: list[list[pyte.screens.Char]] = [[]]
        place = 0, 0
        for number, row in enumerate(rows):
            if number == n_history + self.cursor.y:
                place = len(lines) - 1, len(lines[-1]) + self.cursor.x
            used = max(row, default=-1) + 1
            lines[-1] += [row.get(column, blank) for column in range(used)]
            if not getattr(row, "continues", False):
                lines.append([])
        while len(lines) > place[0] + 1 and not lines[-1]:
            lines.pop()
        return lines, place

    def reflow(self, columns: int) -> None:
        """Change the width."""
        lines, (cursor_line, cursor_cell) = self._lines()
        kind = type(self.buffer[0])
        rows, at = [], (0, 0)
        for number, line in enumerate(lines):
            row = kind(self.default_char)
            rows.append(row)
            used = 0
            for index, cell in enumerate(line):
                stub = index + 1 < len(line) and line[index + 1].data == ""
                if used + 1 + stub > columns:
                    row.continues = True
                    row = kind(self.default_char)
                    rows.append(row)
                    used = 0
                if number == cursor_line and index == cursor_cell:
                    at = len(rows) - 1, used
                row[used] = cell
                used += 1
            if number == cursor_line and cursor_cell >= len(line):
                at = len(rows) - 1, min(used + cursor_cell - len(line), columns)
        n_history = max(len(rows) - self.lines, 0)
        self.columns = columns
        self.history.top.clear()
        self.history.top.extend(rows[:n_history])
        self.buffer.clear()
        self.buffer.update(enumerate(rows[n_history:]))
        self.cursor.y, self.cursor.x = at[0] - n_history, at[1]
        self.margins = None

    def copied(self) -> str:
        """What a user gets who selects all."""
        lines = ["".join(cell.data for cell in line) for line in self._lines()[0]]
        return "\n".join(lines).rstrip("\n")


def cut_words(screen: ReflowingScreen) -> list[str]:
    """Return the words that the terminal cut in two at its edge, but for those longer than half a row, as paths are."""
    rows = [*screen.history.top, *(screen.buffer[number] for number in range(screen.lines))]
    found = []
    for row, below in itertools.pairwise(rows):
        first, rest = row_text(row).rpartition(" ")[2], row_text(below).partition(" ")[0]
        if getattr(row, "continues", False) and first and rest and len(first + rest) < screen.columns // 2:
            found.append(f"{first}|{rest}")
    return found


class Terminal(io.StringIO):
    """A stream that draws on a screen."""

    def __init__(self, columns: int = 80, rows: int = 24, kind: type[Screen] = Screen) -> None:
        super().__init__()
        self.screen = kind(columns, rows)
        self._parser = pyte.Stream(self.screen)
        self.n_writes = 0

    def write(self, text: str) -> int:
        self.n_writes += 1
        self._parser.feed(text)
        return super().write(text)

    def isatty(self) -> bool:
        return True

    def size(self) -> tuple[int, int]:
        return self.screen.columns, self.screen.lines


def rows_of(text: str, columns: int, rows: int) -> list[str]:
    """What a terminal shows of the text alone."""
    terminal = Terminal(columns, rows)
    terminal.write(text)
    return terminal.screen.everything()

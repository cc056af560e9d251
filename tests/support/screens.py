"""An emulated terminal, and time that passes when told to. Not a test itself."""

from __future__ import annotations

import io

import pyte
import pyte.screens

from llmrun.ui.terminal.cells import char_width


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
        return [self._row(row) for row in self.history.top]

    def rows_shown(self) -> list[str]:
        return [self._row(self.buffer[index]) for index in range(self.lines)]

    def everything(self) -> list[str]:
        rows = [*self.scrollback(), *self.rows_shown()]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def _row(self, row: dict[int, pyte.screens.Char]) -> str:
        return "".join(row[column].data for column in range(self.columns)).rstrip()


class Terminal(io.StringIO):
    """A stream that draws on a screen."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        super().__init__()
        self.screen = Screen(columns, rows)
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

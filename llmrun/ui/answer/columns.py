"""Several answers side by side, a column each.

Owns the columns: a row is final when every answer is past it; the rows below are redrawn. The cursor moves only within
these open rows, and is never hidden.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TextIO

from llmrun.protocol.messages import Event, Failed, Finished, Started, TextDelta
from llmrun.ui.answer.meter import Meter, fit
from llmrun.ui.answer.page import Page, in_ascii
from llmrun.ui.answer.view import (
    NO_WRAP,
    PLAIN,
    STATUS_SECONDS,
    SYNC_BEGIN,
    SYNC_END,
    TEXT_SECONDS,
    WRAP,
    DisplayOptions,
    LiveView,
    View,
    answer_view,
    can_show_lines,
    terminal_size,
)
from llmrun.ui.terminal.cells import DIM, TAB, char_width, cut, paint, width
from llmrun.ui.terminal.output import Output

_MIN_CELLS = 24
_GAP = " │ "
_PIECE = re.compile(r"\x1b\[[0-9;]*m|.", re.DOTALL)


def fit_beside(n_answers: int, columns: int) -> bool:
    """Return whether that many columns fit into a terminal at a readable width."""
    return _cells(n_answers, columns) >= _MIN_CELLS


def _cells(n_answers: int, columns: int) -> int:
    return (columns - (n_answers - 1) * len(_GAP)) // n_answers


class CellRows:
    """Styled text cut into rows of `cells` cells, as a terminal of that width would wrap it."""

    def __init__(self, cells: int) -> None:
        self.done: list[str] = []  # complete rows, padded with blanks
        self._cells = cells
        self._row = self._style = ""
        self._used = 0

    def feed(self, text: str) -> None:
        for piece in _PIECE.findall(text):
            if piece[0] == "\x1b":
                self._style = "" if piece == PLAIN else piece
                self._row += piece
            elif piece == "\n":
                self._end_row()
            elif piece == "\t":  # never wraps
                blanks = min(TAB - self._used % TAB, self._cells - self._used)
                self._put(" " * blanks, blanks)
            else:
                self._put(piece, char_width(piece))

    def _put(self, piece: str, cells: int) -> None:
        if self._used + cells > self._cells:
            self._end_row()
        self._row += piece
        self._used += cells

    def _end_row(self) -> None:
        self.done.append(self._filled())
        self._row, self._used = self._style, 0

    def _filled(self) -> str:
        return self._row + (PLAIN if self._style else "") + " " * (self._cells - self._used)

    def flush(self) -> None:
        """End the last row."""
        if self._used:
            self._end_row()

    def row(self, number: int) -> str:
        """Return a row, also the incomplete one, padded with blanks."""
        if number < len(self.done):
            return self.done[number]
        return self._filled() if number == len(self.done) else " " * self._cells

    @property
    def n_rows(self) -> int:
        """Number of rows, with an incomplete one."""
        return len(self.done) + bool(self._used)


class SeedIndex:
    """The mapping of events to answers: their seeds differ, and Started has the seed.

    Args:
        seeds: of the answers, in their order.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._free = dict(zip(seeds, range(len(seeds)), strict=True))
        self._of: dict[int, int] = {}

    def of(self, event: Event) -> int:
        """Return the index of the event's answer; an answer that ends before it began gets any free index."""
        if event.request not in self._of:
            seed = event.seed if isinstance(event, Started) else next(iter(self._free))
            self._of[event.request] = self._free.pop(seed)
        return self._of[event.request]


class _Column:
    def __init__(self, page: Page, cells: int) -> None:
        self.page, self.rows = page, CellRows(cells)
        self.has_ended = False


class ColumnsView(LiveView):
    """Answers side by side. The cursor must be at the start of a row.

    Args:
        stream: the terminal.
        seeds: of the answers.
        places: the index of each event's answer.
        pages: render the text of each answer.
        columns: of the terminal.
        live: keep the line of figures after the first token.
        dim: the terminal may show dim text.
        unicode: it may show characters other than ASCII.
        clock: monotonic seconds.
        size: returns columns and rows of the terminal, called at each drawing.
    """

    def __init__(
        self,
        stream: TextIO,
        seeds: Sequence[int],
        places: SeedIndex,
        pages: Sequence[Page],
        columns: int,
        *,
        live: bool,
        dim: bool = True,
        unicode: bool = True,
        clock: Callable[[], float] = time.monotonic,
        size: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(stream)
        self._seeds, self._places = seeds, places
        self._cells = _cells(len(pages), columns)
        self._columns = [_Column(page, self._cells) for page in pages]
        self._gap = _GAP if unicode else in_ascii(_GAP)
        self._live, self._dim, self._unicode, self._clock = live, dim, unicode, clock
        self._size = size or (lambda: terminal_size(stream))
        self._meter = Meter(clock)
        self._fields: list[str] = []
        self._text_at = self._status_at = float("-inf")
        self._is_started = self._has_text = self._closed = False
        self._n_final = 0  # final rows
        self._n_open = 0  # rows on the screen that will be redrawn

    def show(self, event: Event) -> None:
        """Show an event, at once or within TEXT_SECONDS of the next event or tick."""
        if not (self._is_started and isinstance(event, Started)):
            self._meter.follow(event)  # the shared prompt is prefilled once
        column = self._columns[self._places.of(event)]
        if isinstance(event, Started):
            self._begin()
            column.page.begin(event)
        elif isinstance(event, TextDelta):
            self._has_text = True
            column.page.add(event)
        elif isinstance(event, (Finished, Failed)):
            self._end(column)
        self.tick()

    def _begin(self) -> None:
        """Write the headings."""
        if not self._is_started:
            self._is_started = True
            heads = [cut(f"{place + 1}. seed {seed}", self._cells) for place, seed in enumerate(self._seeds)]
            line = self._gap.join(head + " " * (self._cells - width(head)) for head in heads)
            self._write(paint(line.rstrip(), DIM if self._dim else "") + "\n")

    def _end(self, column: _Column) -> None:
        column.rows.feed(column.page.take(self._cells, last=True))
        column.rows.flush()
        column.has_ended = True

    def tick(self) -> None:
        """Redraw the open rows, if it is time."""
        now = self._clock()
        if now - self._status_at >= STATUS_SECONDS:
            shows = self._live or not self._has_text
            self._fields = self._meter.silence() + (self._meter.fields() if shows else [])
            self._status_at = now
        if not self._closed and now - self._text_at >= TEXT_SECONDS:
            self._text_at = now
            with self._suspendable.writing():
                self._draw()

    def pause(self) -> None:
        """Erase the open rows."""
        self._write(self._erase())
        self._n_open = 0

    def resume(self) -> None:
        """Redraw the open rows."""
        self._meter.resume()
        self._text_at = float("-inf")
        self.tick()

    def close(self) -> None:
        """Write the rest."""
        if self._closed:
            return
        for column in self._columns:
            if not column.has_ended:
                self._end(column)
        self._fields = []
        with self._suspendable.writing():
            self._draw()
        self._n_open, self._closed = 0, True

    def _draw(self) -> None:
        columns, rows = self._size()
        for column in self._columns:
            if not column.has_ended:
                column.rows.feed(column.page.take(self._cells))
        n_rows = max(column.rows.n_rows for column in self._columns)
        n_final = min((len(column.rows.done) for column in self._columns if not column.has_ended), default=n_rows)
        final = [self._row(number) + "\n" for number in range(self._n_final, n_final)]
        status = fit(self._fields, columns - 1)
        room = max(rows - 1 - bool(status), 0)
        shown = [self._row(number) for number in range(n_final, min(n_rows, n_final + room))]
        if status:
            shown.append(paint(status if self._unicode else in_ascii(status), DIM if self._dim else ""))
        drawing = self._erase() + "".join(final) + "\n".join(shown)
        self._n_final, self._n_open = n_final, len(shown)
        if drawing:
            self._write(f"{SYNC_BEGIN}{NO_WRAP}{drawing}{WRAP}{SYNC_END}")

    def _row(self, number: int) -> str:
        return self._gap.join(column.rows.row(number) for column in self._columns).rstrip()

    def _erase(self) -> str:
        """Return the escapes that go back to the first open row and erase all after it."""
        up = f"\x1b[{self._n_open - 1}A" if self._n_open > 1 else ""
        return f"\r{up}\x1b[J" if self._n_open else ""


def n_answers_view(output: Output, seeds: Sequence[int], shown_as: DisplayOptions, *, together: bool) -> View:
    """Return the view of several answers for the kind of stdout; each ends with a newline, and none is coloured.

    Args:
        seeds: of the answers.
        together: the answers are decoded at the same time; else each has its own figures.
    """
    places, stream, styled = SeedIndex(seeds), output.stdout, output.stdout_has_color
    shown_as = replace(shown_as, end_line=True, tints=False, shades=False)
    if together and output.cursor_moves and fit_beside(len(seeds), output.columns()):
        pages = [shown_as.page(output) for _ in seeds]
        live, unicode = shown_as.has_stats(output), can_show_lines(output)
        return ColumnsView(stream, seeds, places, pages, output.columns(), live=live, dim=styled, unicode=unicode)

    def head(place: int) -> None:
        text = f"--- answer {place + 1} of {len(seeds)}, seed {seeds[place]} ---"
        gap = "\n" if place and output.stdout_is_terminal else ""
        output.text(gap + paint(text, DIM if styled else ""))

    each = replace(shown_as, stats=False) if together else shown_as
    return SequentialView(places, len(seeds), head, lambda: answer_view(output, each))


class SequentialView(View):
    """Answers shown one after the other: events of a later one wait until all before it are complete.

    Args:
        places: the index of each event's answer.
        n_answers: number of answers.
        head: writes the heading of an answer.
        view: makes the view of an answer.
    """

    def __init__(
        self, places: SeedIndex, n_answers: int, head: Callable[[int], None], view: Callable[[], View]
    ) -> None:
        self._places, self._head, self._make = places, head, view
        self._waiting: list[list[Event]] = [[] for _ in range(n_answers)]
        self._turn = 0
        self._view: View | None = None
        self._open = ExitStack()

    def show(self, event: Event) -> None:
        """Show an event of the current answer, and then waiting events of the next ones."""
        self._waiting[self._places.of(event)].append(event)
        while self._turn < len(self._waiting) and self._waiting[self._turn]:
            events, self._waiting[self._turn] = self._waiting[self._turn], []
            for each in events:
                self._show(each)
            if isinstance(events[-1], Finished):
                self.close()
                self._turn += 1

    def _show(self, event: Event) -> None:
        if self._view is None:
            self._head(self._turn)
            self._view = self._open.enter_context(self._make())
        self._view.show(event)

    def tick(self) -> None:
        if self._view is not None:
            self._view.tick()

    def close(self) -> None:
        self._view = None
        self._open.close()

"""An answer as it comes: streamed text, one live line of figures below it, a summary at its end.

Owns what is written to the terminal while the engine works; must not know the engine's process. It never
touches termios and never hides the cursor, so that there is nothing to restore.

How the live line stays out of the text: text is written raw, so that the terminal wraps it itself, and
copying and resizing work. To draw, the cursor goes one row down and up again (which scrolls when there is no
row below), its place is saved, the line drawn on the row below, the place restored. Before more text is
written, everything after the cursor is erased. The computed column decides little: at the start of a row the
line is drawn right there, and in a row that is exactly full, where terminals differ in what "restore" means,
the last character waits until the next one comes. So does an emoji: the next character may belong to it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

from llmrun.messages import Event, Failed, Finished, TextDelta
from llmrun.ui.cells import advance, last_cluster, may_grow
from llmrun.ui.meter import Meter, fit, summary
from llmrun.ui.output import Output
from llmrun.ui.sanitize import Sanitizer

# Drawing steals time from decoding, so it comes in bursts.
TEXT_SECONDS = 1 / 30
STATUS_SECONDS = 1 / 12

# Below this there is no room for a line besides the text.
_MIN_COLUMNS, _MIN_ROWS = 8, 3
_ENDLESS = 1 << 62  # columns of a row that never wraps

_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # synchronized output: the terminal shows all of it at once
_ERASE_AFTER, _ERASE_ROW = "\x1b[J", "\x1b[K"
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_ROW_BELOW = "\x1bD\x1b[A"  # down, scrolling if need be, and up again in the same column
_DOWN = "\x1b[B"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class View(Protocol):
    """Shows one answer. Use it in a `with`, or call close()."""

    def show(self, event: Event) -> None:
        """Show what an event brings; all of the answer is out when Finished was shown."""

    def tick(self) -> None:
        """Show what is waiting, if it is time; call it when no event has come for a while."""

    def close(self) -> None:
        """Show the rest and leave the terminal tidy, also after an interrupt. May be called twice."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def answer_view(output: Output, *, n_ctx: int = 0, stats: bool = True) -> View:
    """The right view for where stdout goes.

    Args:
        n_ctx: context window in tokens, when the model was loaded earlier (Loaded tells it otherwise).
        stats: show figures, live and at the end; without them only the wait for the first token is shown.
    """
    summary_to = output.stderr if stats and output.stderr_is_terminal else None
    dim = output.stderr_has_color
    if output.cursor_moves:
        return AnswerView(output.stdout, summary_to, n_ctx=n_ctx, live=stats, dim=dim and output.stdout_has_color)
    return PlainView(output.stdout, summary_to, end_line=output.stdout_is_terminal, dim=dim)


class PlainView:
    """Text and nothing else, for pipes, files and terminals that can't move the cursor.

    Args:
        stream: gets the text, flushed at each event.
        summary_to: gets the summary; None is nowhere.
        end_line: end the text with a newline if it has none.
        dim: the summary may be dim.
    """

    def __init__(
        self, stream: TextIO, summary_to: TextIO | None = None, *, end_line: bool = False, dim: bool = False
    ) -> None:
        self._stream = stream
        self._summary_to = summary_to
        self._end_line = end_line
        self._dim = dim
        self._sanitizer = Sanitizer()
        self._at_line_start = True

    def show(self, event: Event) -> None:
        """Write the event's text, if it has any."""
        if isinstance(event, TextDelta):
            self._write(self._sanitizer.feed(event.text))
        elif isinstance(event, Finished):
            self.close()
            if self._summary_to is not None:
                write_summary(self._summary_to, event, dim=self._dim)
        elif isinstance(event, Failed):
            self.close()

    def tick(self) -> None:
        """Nothing ever waits here."""

    def close(self) -> None:
        """Write what was held back, and the last newline."""
        self._write(self._sanitizer.flush())
        if self._end_line and not self._at_line_start:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()
            self._at_line_start = text.endswith("\n")

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AnswerView:
    """Streamed text with one live line below it, for a terminal. The cursor has to be at the start of a row.

    Args:
        stream: the terminal.
        summary_to: gets the summary; None is nowhere.
        n_ctx: context window in tokens, when the model was loaded earlier.
        live: keep the live line after the first token; loading and prefill show one in any case.
        dim: the terminal may show dim text.
        clock: seconds that only grow.
        size: columns and rows of the terminal, asked at each drawing.
    """

    def __init__(
        self,
        stream: TextIO,
        summary_to: TextIO | None = None,
        *,
        n_ctx: int = 0,
        live: bool = True,
        dim: bool = True,
        clock: Callable[[], float] = time.monotonic,
        size: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._stream = stream
        self._summary_to = summary_to
        self._live = live
        self._dim = dim
        self._clock = clock
        self._size = size or (lambda: terminal_size(stream))
        self._meter = Meter(clock, n_ctx)
        self._sanitizer = Sanitizer()
        self._waiting = ""
        self._column = 0  # of the cursor, as ui.cells.advance counts
        self._line_cells = 0  # of the line that the cursor is in, over all its rows
        self._columns = 0  # of the terminal, at the last drawing
        self._drawn = False  # whether a live line is on the screen
        self._fields: list[str] = []
        self._text_at = self._status_at = float("-inf")
        self._text_began = self._closed = False

    def show(self, event: Event) -> None:
        """Show what an event brings, now or within TEXT_SECONDS of the next event or tick."""
        self._meter.follow(event)
        if isinstance(event, TextDelta):
            self._text(event.text)
        elif isinstance(event, (Finished, Failed)):
            self.close()
        else:
            self.tick()
        if isinstance(event, Finished) and self._summary_to is not None:
            write_summary(self._summary_to, event, dim=self._dim)

    def tick(self) -> None:
        """Write waiting text and redraw the live line, each if it is time."""
        if self._closed:
            return
        now = self._clock()
        changed = False
        if now - self._status_at >= STATUS_SECONDS:
            fields = self._meter.fields() if self._live or not self._text_began else []
            changed = fields != self._fields
            self._fields, self._status_at = fields, now
        if changed or (self._waiting and now - self._text_at >= TEXT_SECONDS):
            self._text_at = now
            self._draw(last=False)

    def close(self) -> None:
        """Write what is waiting, erase the live line, end the text's last row."""
        if self._closed:
            return
        self._closed = True
        self._waiting += self._sanitizer.flush()
        self._fields = []
        self._draw(last=True)
        if self._column:
            self._write("\n")

    def _text(self, text: str) -> None:
        self._waiting += self._sanitizer.feed(text)
        if not self._text_began:
            self._text_began = True
            self._status_at = float("-inf")  # the line for waiting is out of date now
        self.tick()

    def _draw(self, *, last: bool) -> None:
        columns, rows = self._size()
        resized = self._follow_resize(columns)
        room = columns >= _MIN_COLUMNS and rows >= _MIN_ROWS
        erase = self._erase(resized) if self._drawn else ""
        text = self._take_waiting(columns, hold=room and not last)
        self._column = advance(self._column, text, columns)
        self._line_cells = advance(self._line_cells, text, _ENDLESS)
        status = fit(self._fields, columns - 1) if room and self._column < columns else ""
        drawing = erase + text + (self._below(status) if status else "")
        # An interrupt may come anywhere here: a live line counts as drawn from before it can be on the screen
        # until it is certainly gone.
        self._drawn = self._drawn or bool(status)
        self._write(f"{_BEGIN}{drawing}{_END}" if self._drawn else drawing)
        self._drawn = bool(status)

    def _follow_resize(self, columns: int) -> bool:
        resized = self._columns not in {0, columns}
        if resized:
            self._column = advance(0, " " * self._line_cells, columns)  # most terminals wrap the line anew
        self._columns = columns
        return resized

    def _take_waiting(self, columns: int, *, hold: bool) -> str:
        """The waiting text; with hold, without a last character that drawing might disturb."""
        text, self._waiting = self._waiting, ""
        if hold and (advance(self._column, text, columns) == columns or may_grow(text)):
            end = last_cluster(text)
            text, self._waiting = text[:end], text[end:]
        return text

    def _erase(self, resized: bool) -> str:
        if self._column:
            return _ERASE_AFTER
        # The live line is in the cursor's own row, where the terminal may have echoed ^C as well. Erasing all
        # below would move it into tmux's history if this is the topmost row.
        return "\r" + _ERASE_ROW + (_ERASE_AFTER if resized else "")

    def _below(self, status: str) -> str:
        styled = f"{_DIM}{status}{_PLAIN}" if self._dim else status
        # Should the terminal have become narrower this instant, the line must be cut and not wrap.
        line = f"{_NO_WRAP}{styled}{_WRAP}"
        if self._column == 0:  # this row is still free
            return f"{_SAVE}{line}{_RESTORE}"
        return f"{_ROW_BELOW}{_SAVE}{_DOWN}\r{line}{_RESTORE}"

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()

    def __enter__(self) -> AnswerView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_summary(stream: TextIO, finished: Finished, *, dim: bool) -> None:
    """The summary as one line, dim where the terminal may show that."""
    line = summary(finished)
    stream.write(f"{_DIM}{line}{_PLAIN}\n" if dim else f"{line}\n")
    stream.flush()


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Columns and rows of the terminal behind a stream; 80 and 24 where it doesn't tell."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns, rows = 0, 0
    return columns or 80, rows or 24

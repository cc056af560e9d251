"""The view of an answer: streamed text, one live line of figures below it, a summary at its end.

Only the live line is ever rewritten; page.py renders the text. Never touches termios and never hides the cursor, so
that nothing has to be restored. Ctrl-Z erases the live line.

To draw the live line, the cursor goes one row down and up again (which scrolls if there is no row below), its place is
saved, the line is drawn on the row below, and the place is restored. Before more text is written, everything after the
cursor is erased. Little depends on the computed column: at the start of a row the line is drawn in that row; in a row
that is exactly full, where terminals restore differently, the last character waits for the next one. So does an
emoji, because the next character may belong to it.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from llmrun.protocol.loading import LoadProgress
from llmrun.protocol.messages import AnswerPart, Event, Failed, Finished, Started, TextDelta
from llmrun.ui.answer.meter import Meter, fit, in_rows, short_summary, summary
from llmrun.ui.answer.page import Page, Think, in_ascii
from llmrun.ui.terminal.cells import DIM, advance, bare, last_cluster, may_grow, paint
from llmrun.ui.terminal.keyboard import Suspendable
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import Sanitizer

# Drawing takes time from decoding, so output is batched.
TEXT_SECONDS = 1 / 30
STATUS_SECONDS = 1 / 12

# A smaller terminal gets no live line.
_MIN_COLUMNS, _MIN_ROWS = 8, 3
_ENDLESS = 1 << 62  # columns of a row that never wraps

SYNC_BEGIN, SYNC_END = "\x1b[?2026h", "\x1b[?2026l"
"""Around a drawing: the terminal shows it at once, without flicker."""
_ERASE_AFTER, _ERASE_ROW = "\x1b[J", "\x1b[K"
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_ROW_BELOW = "\x1bD\x1b[A"  # down, scrolling if need be, and up again in the same column
_DOWN = "\x1b[B"
_RIGHT = "\x1b[{}C"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
PLAIN = "\x1b[0m"


class View(ABC):
    """A view of one answer. Use it in a `with`, or call close()."""

    @abstractmethod
    def show(self, event: Event) -> None:
        """Show an event; after Finished all of the answer is written."""

    @abstractmethod
    def tick(self) -> None:
        """Write buffered text if it is time; to be called when no event has come for a while."""

    @abstractmethod
    def close(self) -> None:
        """Write the rest and leave the terminal tidy, also after an interrupt. May be called twice."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LiveView(View):
    """A view that erases and redraws a part of the terminal; Ctrl-Z erases that part.

    Args:
        stream: the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._suspendable = Suspendable(self.pause, self.resume)

    @abstractmethod
    def pause(self) -> None:
        """Erase everything that is not final."""

    @abstractmethod
    def resume(self) -> None:
        """Continue at the start of a row. Does nothing without a pause()."""

    def __enter__(self) -> LiveView:
        self._suspendable.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.close()
        finally:
            self._suspendable.__exit__()

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()


@dataclass(frozen=True, slots=True)
class DisplayOptions:
    """The display of answers."""

    stats: bool | None = None  # figures during and after an answer; None: a few, if stdout and stderr are a terminal
    markdown: bool = True  # on a terminal that can show it
    think: Think = "fold"  # display of the reasoning; in a pipe "on" writes all of it with its tags, others none
    end_line: bool = False  # end an answer with a newline in a pipe too
    tints: bool = False  # colour drafted tokens, on a terminal that can
    shades: bool = False  # colour all tokens by their probability

    def has_stats(self, output: Output) -> bool:
        """Return whether to show figures; without them only the wait for the first token is shown."""
        return output.stdout_is_terminal and output.stderr_is_terminal if self.stats is None else self.stats

    @property
    def is_short(self) -> bool:
        """Whether a summary has only the main figures, and is left out before tool calls."""
        return self.stats is None

    def page(self, output: Output) -> Page:
        """Return what renders one answer on a terminal."""
        return Page(
            time.monotonic,
            think=self.think,
            markdown=self.markdown,
            styled=output.stdout_has_color,
            unicode=can_show_lines(output),
            tints=self.tints,
            shades=self.shades,
        )


def answer_view(output: Output, shown_as: DisplayOptions, *, n_ctx: int = 0) -> View:
    """Return the view of an answer for the kind of stdout.

    Args:
        n_ctx: context window in tokens, if the model was loaded earlier (Loaded reports it otherwise).
    """
    stats, short = shown_as.has_stats(output), shown_as.is_short
    summary_to = output.stderr if stats else None
    dim = output.stderr_has_color
    if not output.cursor_moves:
        return PlainView(
            output.stdout,
            summary_to,
            end_line=shown_as.end_line or output.stdout_is_terminal,
            says_thinking=output.stdout_is_terminal,
            dim=dim,
            thoughts=shown_as.think == "on",
            short=short,
            columns=output.columns(stderr=True),
        )
    return AnswerView(
        output.stdout,
        summary_to,
        n_ctx=n_ctx,
        live=stats,
        dim=dim and output.stdout_has_color,
        page=shown_as.page(output),
        unicode=can_show_lines(output),
        short=short,
    )


class PlainView(View):
    """The view for pipes, files and terminals that can't move the cursor: text alone.

    Args:
        stream: flushed at each event.
        summary_to: stream of the summary, if any.
        end_line: end the text with a newline.
        dim: dim the summary.
        thoughts: write the reasoning too, between its tags.
        says_thinking: write a note instead of reasoning, so that the user sees progress.
        short: shorten the summary.
        columns: of the summary's terminal, see write_summary().
    """

    def __init__(
        self,
        stream: TextIO,
        summary_to: TextIO | None = None,
        *,
        end_line: bool = False,
        dim: bool = False,
        thoughts: bool = False,
        says_thinking: bool = False,
        short: bool = False,
        columns: int = 0,
    ) -> None:
        self._short, self._columns = short, columns
        self._stream = stream
        self._summary_to = summary_to
        self._end_line = end_line
        self._dim = dim
        self._sanitizer = Sanitizer()
        self._thoughts = thoughts
        self._tags: tuple[str, ...] = ()
        self._is_reasoning = self._has_calls = False
        self._says_thinking = says_thinking
        self._at_line_start = True

    def show(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._write("".join(map(self._shown, event.answer_parts)))
        elif isinstance(event, Started):
            self._tags = event.thinking_tags
        elif isinstance(event, Finished):
            self.close()
            if self._summary_to is not None and not (self._short and self._has_calls):
                write_summary(self._summary_to, event, dim=self._dim, columns=self._columns, short=self._short)
        elif isinstance(event, Failed):
            self.close()

    def tick(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        """Write incomplete sequences and the last newline."""
        self._write(self._sanitizer.flush())
        if self._end_line and not self._at_line_start:
            self._write("\n")

    def _shown(self, part: AnswerPart) -> str:
        """Return the text to write for a part."""
        self._has_calls = self._has_calls or part.kind == "call_end"
        if part.kind == "reasoning":
            begins, self._is_reasoning = not self._is_reasoning, True
            if self._thoughts:
                return (self._tags[0] if begins else "") + self._sanitizer.feed(part.text)
            note = "(thinking ...)\n" if self._says_thinking else ""
            self._says_thinking = False
            return note
        if part.kind == "reasoning_end":
            ended, self._is_reasoning = self._is_reasoning and self._thoughts, False
            return f"{self._tags[1]}\n\n" if ended else ""
        return self._sanitizer.feed(part.text) if part.kind == "text" else ""

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()
            self._at_line_start = text.endswith("\n")


class AnswerView(LiveView):
    """The view for a terminal: streamed text with a live line below it. The cursor must be at the start of a row.

    Args:
        stream: the terminal.
        summary_to: stream of the summary, if any.
        n_ctx: context window in tokens, if the model was loaded earlier.
        live: keep the live line after the first token; loading and prefill always show one.
        dim: the terminal may show dim text.
        clock: monotonic seconds.
        size: returns columns and rows of the terminal, called at each drawing.
        page: renders the text; unchanged by default.
        unicode: the terminal may show characters other than ASCII.
        short: shorten the summary.
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
        page: Page | None = None,
        unicode: bool = True,
        short: bool = False,
    ) -> None:
        super().__init__(stream)
        self._short = short
        self._summary_to = summary_to
        self._live = live
        self._dim = dim
        self._clock = clock
        self._size = size or (lambda: terminal_size(stream))
        self._meter = Meter(clock, n_ctx)
        self._unicode = unicode
        self._page = page or Page(clock)
        self._withheld = ""  # the last character of the text, if drawing might disturb it
        self._column = 0  # of the cursor, as cells.advance() counts
        self._line_cells = 0  # of the cursor's line, over all its rows
        self._columns = 0  # of the terminal, at the last drawing
        self._is_drawn = False  # a live line is on the screen
        self._fields: list[str] = []
        self._text_at = self._status_at = float("-inf")
        self._text_began = self._closed = self._is_paused = False

    def show(self, event: Event) -> None:
        """Show an event, at once or within TEXT_SECONDS of the next event or tick."""
        self._meter.follow(event)
        if isinstance(event, TextDelta):
            self._page.add(event)
            if not self._text_began:
                self._text_began = True
                self._status_at = float("-inf")  # redraw the line now
            self.tick()
        elif isinstance(event, (Finished, Failed)):
            self.close()
        else:
            if isinstance(event, LoadProgress):
                self._page.prepare()
            if isinstance(event, Started):
                self._page.begin(event)
            self.tick()
        is_shown = not (self._short and self._page.has_calls)
        if isinstance(event, Finished) and self._summary_to is not None and is_shown:
            write_summary(self._summary_to, event, dim=self._dim, columns=self._columns, short=self._short)

    def tick(self) -> None:
        """Write buffered text and redraw the live line, each if it is time."""
        if self._closed:
            return
        now = self._clock()
        changed = False
        if now - self._status_at >= STATUS_SECONDS:
            fields = self._meter.silence() + self._page.fields()
            if self._live or not self._text_began:
                fields += self._meter.fields()
            changed = fields != self._fields
            self._fields, self._status_at = fields, now
        if changed or ((self._page.waiting or self._withheld) and now - self._text_at >= TEXT_SECONDS):
            self._text_at = now
            with self._suspendable.writing():
                self._draw(last=False)

    def pause(self) -> None:
        """Erase the live line, and end the row."""
        if not self._closed:
            self._write((self._erase(False) if self._is_drawn else "") + ("\n" if self._column else ""))
            self._is_drawn, self._is_paused = False, True

    def resume(self) -> None:
        """Continue in the same column, so that rows wrap at the same places."""
        if not self._is_paused:
            return
        self._is_paused = False
        columns, _ = self._size()
        self._follow_resize(columns)
        self._column %= columns
        self._line_cells = self._column
        self._write(_RIGHT.format(self._column) if self._column else "")
        self._fields, self._status_at = [], float("-inf")
        self._meter.resume()
        self.tick()

    def close(self) -> None:
        """Write the buffered text, erase the live line, end the last row."""
        if self._closed:
            return
        self._closed = True
        self._fields = []
        with self._suspendable.writing():
            self._draw(last=True)
        if self._column:
            self._write("\n")

    def _draw(self, *, last: bool) -> None:
        columns, rows = self._size()
        resized = self._follow_resize(columns)
        room = columns >= _MIN_COLUMNS and rows >= _MIN_ROWS
        erase = self._erase(resized) if self._is_drawn else ""
        text = self._withheld + self._page.take(columns, last=last)
        text = text if last or not room else self._without_last(text, columns)
        shown = bare(text)
        self._column = advance(self._column, shown, columns)
        self._line_cells = advance(self._line_cells, shown, _ENDLESS)
        status = fit(self._fields, columns - 1) if room and self._column < columns else ""
        drawing = erase + text + (self._below(status) if status else "")
        # An interrupt may come at any point: a live line counts as drawn from before its output until after its
        # erasure.
        self._is_drawn = self._is_drawn or bool(status)
        self._write(f"{SYNC_BEGIN}{drawing}{SYNC_END}" if self._is_drawn else drawing)
        self._is_drawn = bool(status)

    def _follow_resize(self, columns: int) -> bool:
        resized = self._columns not in {0, columns}
        if resized:
            self._column = advance(0, " " * self._line_cells, columns)  # most terminals rewrap the line
        self._columns = columns
        return resized

    def _without_last(self, text: str, columns: int) -> str:
        """Return the text without a last character that drawing might disturb; it is kept for the next drawing."""
        self._withheld = ""
        if text.endswith(PLAIN):  # styled words are complete
            return text
        if may_grow(text) or advance(self._column, bare(text), columns) == columns:
            end = last_cluster(text)
            text, self._withheld = text[:end], text[end:]
        return text

    def _erase(self, resized: bool) -> str:
        if self._column:
            return _ERASE_AFTER
        # The live line is in the cursor's own row, where the terminal may have echoed ^C as well. Erasing all
        # rows below would move it into tmux's history if this is the topmost row.
        return "\r" + _ERASE_ROW + (_ERASE_AFTER if resized else "")

    def _below(self, status: str) -> str:
        styled = paint(status if self._unicode else in_ascii(status), DIM if self._dim else "")
        # If the terminal has just become narrower, the line must be cut, not wrapped.
        line = f"{NO_WRAP}{styled}{WRAP}"
        if self._column == 0:  # this row is empty
            return f"{_SAVE}{line}{_RESTORE}"
        return f"{_ROW_BELOW}{_SAVE}{_DOWN}\r{line}{_RESTORE}"


def write_summary(
    stream: TextIO,
    finished: Finished,
    *,
    dim: bool,
    columns: int = 0,
    short: bool = False,
) -> None:
    """Write the summary as one line, dim if the terminal may show that.

    Args:
        short: only the main figures.
        columns: of the terminal, to break the line between its fields; 0 leaves it whole.
    """
    line = short_summary(finished) if short else summary(finished)
    rows = in_rows(line, columns - 2) if columns else [line]  # room for a separator at the end
    shown = "\n".join(rows if can_show(stream, line) else map(in_ascii, rows))
    stream.write(paint(shown, DIM if dim else "") + "\n")
    stream.flush()


def can_show(stream: TextIO, text: str) -> bool:
    """Return whether the stream's encoding has all characters of the text."""
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError, AttributeError):
        return False
    return True


def can_show_lines(output: Output) -> bool:
    """Return whether stdout can show the characters of a page that are not ASCII."""
    return can_show(output.stdout, "•│─·…")


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Return columns and rows of the terminal of a stream; 80 and 24 if unknown."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns, rows = 0, 0
    return columns or 80, rows or 24

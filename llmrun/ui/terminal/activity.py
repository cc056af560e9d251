"""Progress of a long task on stderr: a bar or a status line on a terminal; off a terminal a plain line now and then.

Owns the drawing, and its rate; must not know the task.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from llmrun.ui.terminal.ansi import DIM, paint
from llmrun.ui.terminal.cells import cut
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.suspend import Suspendable

_BAR_HZ = 8
_LINE_SECONDS = 10.0
_ERASE = "\r\x1b[2K"


class StatusLine:
    """A line at the end of stderr that is rewritten in place, without Rich's thread, which would disturb a measurement.

    Nothing is drawn off a terminal or beside JSON.
    """

    def __init__(self, output: Output) -> None:
        self._output, self._is_drawn = output, False

    def show(self, text: str) -> None:
        """Replace the line."""
        output = self._output
        if not output.stderr_cursor_moves or output.json:
            return
        self._is_drawn = True
        output.stderr.write(_ERASE + paint(cut(text, self.columns), DIM if output.stderr_has_color else ""))
        output.stderr.flush()

    @property
    def columns(self) -> int:
        """Cells that a line may have: the terminal writes ^C after it."""
        return max((self._output.columns(stderr=True) or 80) - len("^C"), 20)

    def clear(self) -> None:
        """Erase the line."""
        if self._is_drawn:
            self._is_drawn = False
            self._output.stderr.write(_ERASE)
            self._output.stderr.flush()


class Activity:
    """A progress bar until the end of the block. Nothing is drawn beside JSON.

    with Activity(output) as activity:
        activity.show("reading", 0.4, "12 s left")

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, output: Output, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._clock = output, clock
        self._line_at = clock()
        self._begun = ""  # the last task with a line of its own
        self._bar: Any = None
        self._task: Any = None
        self._suspendable = Suspendable(self.pause)

    def __enter__(self) -> Activity:
        self._suspendable.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.pause()
        self._suspendable.__exit__()

    def show(self, words: str, share: float | None = None, left: str = "", *, begins: bool = False) -> None:
        """Show the progress; cheap enough to be called often.

        Args:
            words: the task; untrusted text.
            share: the part that is done, 0 to 1; None if unknown.
            left: the remaining time, e.g. "12 s left".
            begins: a new task starts, which gets a line of its own off a terminal.
        """
        words = clean(words)
        if self._output.json:
            return
        if self._output.stderr_cursor_moves:
            with self._suspendable.writing():
                self._draw(words, share, left)
        elif begins and words != self._begun:
            self._begun = words
            self.note(words)
        elif self._clock() - self._line_at >= _LINE_SECONDS:
            self.note(", ".join(filter(None, (words, "" if share is None else f"{share:.0%}", left))))

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        # Text written while the bar is drawn would end up in its middle.
        self.pause()
        self._line_at = self._clock()
        self._output.note(text)

    def pause(self) -> None:
        """Erase the bar until the next show()."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, words: str, share: float | None, left: str) -> None:
        if self._bar is None:
            self._begin()
        self._bar.update(
            self._task, description=words, completed=share or 0.0, total=None if share is None else 1.0, left=left
        )

    def _begin(self) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        console = self._output.console(stderr=True)
        console.width -= len("^C")  # which the terminal writes after the bar; on the next row it would stay
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}", style="progress.remaining", markup=False),
            console=console,
            refresh_per_second=_BAR_HZ,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, left="")
        self._bar.start()

"""How far something is that takes its time: one bar on a terminal, now and then a plain line anywhere else.

Owns the drawing, and how often; must not know what is being done. Always on stderr.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.suspend import Suspendable

_BAR_HZ = 8
_LINE_SECONDS = 10.0


class Activity:
    """Something that goes on, shown until the block ends, however it ends. Beside JSON nothing is drawn.

    with Activity(output) as activity:
        activity.show("reading", 0.4, "12 s left")
    """

    def __init__(self, output: Output, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin.

        Args:
            clock: monotonic seconds.
        """
        self._output, self._clock = output, clock
        self._line_at = clock()
        self._bar: Any = None
        self._task: Any = None
        self._suspendable = Suspendable(self.pause)

    def __enter__(self) -> Activity:
        self._suspendable.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.pause()
        self._suspendable.__exit__()

    def show(self, words: str, share: float | None = None, left: str = "", *, begins: bool = False) -> None:
        """Say how far it is, as often as one likes.

        Args:
            words: what is being done; untrusted text.
            share: of it that is done, 0 to 1; None when nobody can tell.
            left: how long it will take, e.g. "12 s left".
            begins: something else than before, which is worth a line of its own.
        """
        words = clean(words)
        if self._output.json:
            return
        if self._output.stderr_cursor_moves:
            with self._suspendable.writing():
                self._draw(words, share, left)
        elif begins:
            self.note(words)
        elif self._clock() - self._line_at >= _LINE_SECONDS:
            self.note(", ".join(filter(None, (words, "" if share is None else f"{share:.0%}", left))))

    def note(self, text: str) -> None:
        """A line of its own."""
        # Without the bar in the way: a line that is written while it is drawn ends up in its middle.
        self.pause()
        self._line_at = self._clock()
        self._output.note(text)

    def pause(self) -> None:
        """Make room for lines on the terminal; the next show() goes on."""
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
        console.width -= len("^C")  # which the terminal writes behind the bar: in the next line it would stay
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}", style="progress.remaining", markup=False),
            console=console,
            refresh_per_second=_BAR_HZ,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,  # what comes of it says all that was of interest
        )
        self._task = self._bar.add_task("", total=None, left="")
        self._bar.start()

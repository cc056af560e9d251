"""Progress of work on a terminal: a live line, bars of downloads and stages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.cells import DIM, cut, paint
from llmrun.ui.terminal.format import rate_of_bytes, seconds
from llmrun.ui.terminal.keyboard import Suspendable
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean

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


_NOTICED_SECONDS = 3.0


class Pace:
    """Speed and remaining time of a transfer, smoothed.

    The speed is an exponential average over time: bytes of `smooth_seconds` ago count a third. Bytes present before the
    first call don't count.
    """

    def __init__(self, smooth_seconds: float = 8.0) -> None:
        self._smooth_seconds = smooth_seconds
        self.restart()

    def restart(self) -> None:
        """Reset: the transfer began again."""
        self._done = -1
        self._at = self._first_at = self._arrived_at = 0.0
        self._weighted = self._weight = 0.0

    def update(self, done: int, now: float) -> None:
        """Record the number of bytes at a time in seconds."""
        if self._done < 0:
            self._done, self._at, self._first_at, self._arrived_at = done, now, now, now
            return
        elapsed = now - self._at
        if elapsed <= 0:
            return
        fading = math.exp(-elapsed / self._smooth_seconds)
        share = 1 - fading
        self._weighted = self._weighted * fading + (done - self._done) / elapsed * share
        self._weight = self._weight * fading + share
        if done > self._done:
            self._arrived_at = now
        self._done, self._at = done, now

    @property
    def bytes_per_second(self) -> float:
        """Speed; 0.0 while unknown."""
        return self._weighted / self._weight if self._weight > 0 else 0.0

    def seconds_left(self, total: int) -> float | None:
        """Return the remaining time; None in the first second, and while nothing arrives."""
        if self._at - self._first_at < 1.0 or self.bytes_per_second <= 0 or self.is_waiting:
            return None
        return max(total - self._done, 0) / self.bytes_per_second

    @property
    def is_waiting(self) -> bool:
        """Whether nothing has arrived for a while."""
        return self._at - self._arrived_at >= _NOTICED_SECONDS


def rounded_seconds(value: float) -> str:
    """Return an estimated duration, rounded: "8 s", "1 min 20 s", "2 h 5 min"."""
    step = 1 if value < 20 else 5 if value < 60 else 10 if value < 600 else 60
    whole = max(step, round(value / step) * step)
    return f"{whole} s" if whole < 60 else seconds(float(whole))


def time_left(value: float | None) -> str:
    """Return seconds as "8 s left"; "" for None."""
    return "" if value is None else f"{rounded_seconds(value)} left"


class DownloadProgress:
    """The display of a download, called with (bytes done, total bytes or None if unknown).

    Bytes present before the first call (a resumed download) do not count for the speed.
    """

    def __init__(self, activity: Activity, title: str, clock: Callable[[], float]) -> None:
        self._activity, self._title, self._clock = activity, title, clock
        self._pace = Pace()
        self._first = self._done = -1
        self._first_at = 0.0
        self.note = activity.note

    def __call__(self, done: int, total: int | None) -> None:
        now, begins = self._clock(), self._done < 0
        if begins:
            self._first, self._first_at = done, now
        elif done < self._done:  # the server could not go on where we were
            self._pace.restart()
            self._first = min(self._first, done)
        self._done = done
        self._pace.update(done, now)
        words = f"{self._title}: {readable_size(done)}" + (f" of {readable_size(total)}" if total else "")
        self._activity.show(words, done / total if total else None, self._left(total), begins=begins)

    def end(self) -> None:
        """Print a summary, unless nothing had to be downloaded."""
        if self._done < 0:
            return
        took = self._clock() - self._first_at
        speed = f", {rate_of_bytes((self._done - self._first) / took)}" if took > 0 else ""
        self.note(f"{self._title}: {readable_size(self._done)} in {seconds(took)}{speed}")

    def _left(self, total: int | None) -> str:
        if total and self._done >= total:
            return "checking"
        if self._pace.is_waiting:
            return "waiting for the server"
        speed, left = self._pace.bytes_per_second, self._pace.seconds_left(total) if total else None
        return ", ".join(filter(None, (rate_of_bytes(speed) if speed else "", time_left(left))))


@contextmanager
def download_progress(
    output: Output, title: str, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[DownloadProgress]:
    """Show a download until the end of the block.

    Args:
        title: the file; untrusted text.
        clock: monotonic seconds.
    """
    with Activity(output, clock=clock) as activity:
        shown = DownloadProgress(activity, title, clock)
        yield shown
        shown.end()

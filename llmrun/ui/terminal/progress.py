"""How far a download is: a bar on a terminal, now and then a plain line anywhere else. Always on stderr.

Owns the drawing, and how fast a transfer is and how long it will take; must not know the network.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llmrun.ui.terminal.format import rate_of_bytes, seconds, size
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean

_BAR_HZ = 8
_LINE_SECONDS = 10.0
_NOTICED_SECONDS = 3.0


class Pace:
    """Speed and time left of a transfer, smoothed so that neither jumps.

    The speed is an exponential average over time: of what came `smooth_seconds` ago a third still counts. Bytes that
    were there before the first call don't count.

    Args:
        smooth_seconds: how long ago still matters.
    """

    def __init__(self, smooth_seconds: float = 8.0) -> None:
        self._smooth_seconds = smooth_seconds
        self.restart()

    def restart(self) -> None:
        """Forget everything: the transfer began again."""
        self._done = -1
        self._at = self._first_at = self._arrived_at = 0.0
        self._weighted = self._weight = 0.0

    def update(self, done: int, now: float) -> None:
        """So many bytes are there at this time, in seconds."""
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
        """0.0 in the beginning, when nobody can tell."""
        return self._weighted / self._weight if self._weight > 0 else 0.0

    def seconds_left(self, total: int) -> float | None:
        """None while nobody can tell: in the first second, and when nothing arrives."""
        if self._at - self._first_at < 1.0 or self.bytes_per_second <= 0 or self.is_waiting:
            return None
        return max(total - self._done, 0) / self.bytes_per_second

    @property
    def is_waiting(self) -> bool:
        """Whether nothing has arrived for a while."""
        return self._at - self._arrived_at >= _NOTICED_SECONDS


def rounded_seconds(value: float) -> str:
    """A time that is only guessed, as coarse as the guess: "8 s", "1 min 20 s", "2 h 5 min"."""
    step = 1 if value < 20 else 5 if value < 60 else 10 if value < 600 else 60
    whole = max(step, round(value / step) * step)
    return f"{whole} s" if whole < 60 else seconds(float(whole))


def time_left(value: float | None) -> str:
    """Seconds as "8 s left"; "" when nobody can tell."""
    return "" if value is None else f"{rounded_seconds(value)} left"


class Shown(ABC):
    """A download that is being shown. It is called with (bytes done, bytes in all or None when nobody knows)."""

    @abstractmethod
    def __call__(self, done: int, total: int | None) -> None:
        """As often as one likes. What was there before (a resumed download) is what the first call names."""

    @abstractmethod
    def note(self, text: str) -> None:
        """One line beside the bar, as Output.note() writes it."""


@contextmanager
def download_progress(output: Output, title: str, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Shown]:
    """Show a download until the block ends, however it ends.

    Args:
        title: what is downloaded; untrusted text.
        clock: monotonic seconds.
    """
    name = clean(title)
    if output.stderr_cursor_moves and not output.json:
        bar = _Bar(output, name, clock)
        try:
            yield bar
        finally:
            bar.end()
    else:
        lines = _Lines(output, name, clock)
        yield lines
        lines.end()


class _Bar(Shown):
    """A bar that is drawn _BAR_HZ times a second, from the first call on."""

    def __init__(self, output: Output, title: str, clock: Callable[[], float]) -> None:
        self._output = output
        self._title = title
        self._clock = clock
        self._pace = Pace()
        self._done = -1
        self._progress: Any = None
        self._task: Any = None

    def __call__(self, done: int, total: int | None) -> None:
        if self._progress is None:
            self._begin()
        if done < self._done:  # the server could not go on where we were
            self._pace.restart()
            self._progress.reset(self._task)
        self._done = done
        self._pace.update(done, self._clock())
        self._progress.update(
            self._task, completed=done, total=total or None, speed=self._speed(), left=self._left(done, total)
        )

    def note(self, text: str) -> None:
        if self._progress is None:
            self._output.note(text)
            return
        # Without the bar in the way: a line that is written while it is drawn ends up in the middle of it.
        self._progress.stop()
        self._output.note(text)
        self._progress.start()

    def end(self) -> None:
        """Leave the bar as it is, without guesses."""
        if self._progress is not None:
            self._progress.update(self._task, left="")
            self._progress.stop()

    def _begin(self) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            DownloadColumn(),
            TextColumn("{task.fields[speed]}", style="progress.data.speed", markup=False),
            TextColumn("{task.fields[left]}", style="progress.remaining", markup=False),
            console=self._output.console(stderr=True),
            refresh_per_second=_BAR_HZ,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(self._title, total=None, speed="", left="")
        self._progress.start()

    def _speed(self) -> str:
        speed = self._pace.bytes_per_second
        return rate_of_bytes(speed) if speed else ""

    def _left(self, done: int, total: int | None) -> str:
        if total and done >= total:
            return "checking"
        if self._pace.is_waiting:
            return "waiting for the server"
        left = self._pace.seconds_left(total) if total else None
        return time_left(left)


class _Lines(Shown):
    """One line at the start, one every _LINE_SECONDS, one at the end."""

    def __init__(self, output: Output, title: str, clock: Callable[[], float]) -> None:
        self._output = output
        self._title = title
        self._clock = clock
        self._pace = Pace()
        self._first_at = self._line_at = clock()
        self._first = self._done = -1

    def __call__(self, done: int, total: int | None) -> None:
        now = self._clock()
        if 0 <= done < self._done:  # the server could not go on where we were
            self._pace.restart()
            self._first = min(self._first, done)
        self._pace.update(done, now)
        begins = self._first < 0
        if begins:
            self._first, self._first_at = done, now
        self._done = done
        if begins or now - self._line_at >= _LINE_SECONDS:
            self._line_at = now
            self._output.note(self._line(done, total))

    def note(self, text: str) -> None:
        self._output.note(text)

    def end(self) -> None:
        """Only for a download that ended well."""
        if self._done >= 0:
            took = self._clock() - self._first_at
            speed = f", {rate_of_bytes((self._done - self._first) / took)}" if took > 0 else ""
            self._output.note(f"{self._title}: {size(self._done)} in {seconds(took)}{speed}")

    def _line(self, done: int, total: int | None) -> str:
        line = f"{self._title}: {size(done)}"
        if not total:
            return line
        line += f" of {size(total)} ({done / total:.0%})"
        left = self._pace.seconds_left(total)
        if left is None or done >= total:
            return line
        return f"{line}, {rate_of_bytes(self._pace.bytes_per_second)}, {time_left(left)}"

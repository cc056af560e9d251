"""How far a download is: a bar on a terminal, now and then a plain line anywhere else. Always on stderr.

Owns the drawing; must not know the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmrun.ui.figures import rate_of_bytes, seconds, size
from llmrun.ui.output import Output
from llmrun.ui.sanitize import clean

OnProgress = Callable[[int, int | None], None]
"""on_progress(bytes done, bytes in all or None when nobody knows)."""

_BAR_HZ = 8
_LINE_SECONDS = 10.0


@contextmanager
def download_progress(
    output: Output, title: str, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[OnProgress]:
    """Show a download until the block ends, however it ends.

    Args:
        title: what is downloaded; foreign text.
        clock: seconds that only grow.

    Yields:
        The function to call as often as one likes. What was there before (a resumed download) is what the
        first call names, and counts for the bar but not for the speed.
    """
    name = clean(title)
    if output.stderr_cursor_moves and not output.json:
        with _bar(output, name) as on_progress:
            yield on_progress
    else:
        lines = _Lines(output, name, clock)
        yield lines.on_progress
        lines.end()


@contextmanager
def _bar(output: Output, title: str) -> Iterator[OnProgress]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=output.console(stderr=True),
        refresh_per_second=_BAR_HZ,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task(title, total=None)
        before = -1

        def on_progress(done: int, total: int | None) -> None:
            nonlocal before
            if before < 0 or done < before:  # the first call, or the transfer started again
                bar.reset(task, completed=done, total=total)
            else:
                bar.update(task, completed=done, total=total)
            before = done

        yield on_progress


class _Lines:
    """One line at the start, one every _LINE_SECONDS, one at the end."""

    def __init__(self, output: Output, title: str, clock: Callable[[], float]) -> None:
        self._output = output
        self._title = title
        self._clock = clock
        self._first_at = self._line_at = clock()
        self._first = self._done = -1

    def on_progress(self, done: int, total: int | None) -> None:
        now = self._clock()
        if self._first < 0:
            self._first, self._first_at = done, now
        elif now - self._line_at < _LINE_SECONDS:
            self._done = done
            return
        self._done, self._line_at = done, now
        share = f" of {size(total)} ({done / total:.0%})" if total else ""
        self._output.note(f"{self._title}: {size(done)}{share}")

    def end(self) -> None:
        """Only for a download that ended well."""
        if self._done >= 0:
            took = self._clock() - self._first_at
            speed = f", {rate_of_bytes((self._done - self._first) / took)}" if took > 0 else ""
            self._output.note(f"{self._title}: {size(self._done)} in {seconds(took)}{speed}")

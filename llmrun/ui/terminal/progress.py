"""How far a download is, how fast, and how long it will take; an Activity draws it. Must not know the network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.activity import Activity
from llmrun.ui.terminal.format import rate_of_bytes, seconds
from llmrun.ui.terminal.output import Output

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


class DownloadProgress:
    """A download that is being shown. It is called with (bytes done, bytes in all or None when nobody knows).

    What was there before the first call (a resumed download) does not count for the speed.
    """

    def __init__(self, activity: Activity, title: str, clock: Callable[[], float]) -> None:
        self._activity, self._title, self._clock = activity, title, clock
        self._pace = Pace()
        self._first = self._done = -1
        self._first_at = 0.0
        self.note = activity.note

    def __call__(self, done: int, total: int | None) -> None:
        """As often as one likes."""
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
        """All of it is there; nothing is said where nothing had to come."""
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
    """Show a download until the block ends, however it ends.

    Args:
        title: what is downloaded; untrusted text.
        clock: monotonic seconds.
    """
    with Activity(output, clock=clock) as activity:
        shown = DownloadProgress(activity, title, clock)
        yield shown
        shown.end()

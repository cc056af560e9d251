"""Ctrl-Z and `fg`: what lives on the terminal is cleared before the process stops, and comes back when it goes on.

Owns SIGTSTP and SIGCONT; must not know what is on the terminal.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Suspendable:
    """Something on the terminal that a stopped process must not leave there. Use it in a `with`; they can be nested.

    Args:
        pause: clears it, and undoes what was set on the terminal.
        resume: sets that again, also after a stop that no process can notice (SIGSTOP); may be called twice.
    """

    def __init__(self, pause: Callable[[], None], resume: Callable[[], None] = lambda: None) -> None:
        self._pause, self._resume = pause, resume
        self._before: dict[int, Any] = {}
        self._is_writing = self._must_stop = False

    def __enter__(self) -> Suspendable:
        stop = getattr(signal, "SIGTSTP", None)  # Windows has none
        is_main = threading.current_thread() is threading.main_thread()
        if stop is not None and is_main and signal.getsignal(stop) is not signal.SIG_IGN:
            self._before = {stop: signal.signal(stop, self._on_stop)}
            self._before[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._on_continue)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, the terminal is between two states: a stop waits for the end."""
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False
            if self._must_stop:
                self._must_stop = False
                self._on_stop(signal.SIGTSTP, None)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self._is_writing:
            self._must_stop = True
            return
        self._pause()
        before = self._before.get(number)
        if callable(before):  # what is around this one
            before(number, frame)
        else:
            _stop()
        self._resume()

    def _on_continue(self, number: int, frame: FrameType | None) -> None:
        if callable(before := self._before.get(number)):
            before(number, frame)
        self._resume()


def _stop() -> None:
    """Stop this process; return when it is continued. Without a shell that could do that, the system stops nothing."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)

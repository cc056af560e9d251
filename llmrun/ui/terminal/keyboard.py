"""The input mode of the terminal, with or without echo; Ctrl-Z and `fg`, which erase a live display and redraw it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from llmrun.system import SIGNAL_SECONDS

_INPUT_MODES, _LOCAL_MODES = 0, 3  # indices into the result of tcgetattr()


def terminal_mode(stdin: TextIO) -> list[Any] | None:
    """Return the mode of the terminal at stdin, None without a terminal."""
    if sys.platform == "win32":
        return None
    import termios

    try:
        return termios.tcgetattr(stdin.fileno())
    except (OSError, ValueError, termios.error):  # a stream without a file, or no terminal
        return None


def restore_terminal_mode(stdin: TextIO, mode: list[Any]) -> None:
    """Set the mode of the terminal, unless the terminal is gone, or another program is in the foreground."""
    if sys.platform == "win32":
        return
    import termios

    try:
        descriptor = stdin.fileno()
        if termios.tcgetattr(descriptor) != mode and not _is_in_background(descriptor):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
    except (OSError, ValueError, termios.error):
        return


def _is_in_background(descriptor: int) -> bool:
    """Return whether the system would stop this process for changing the terminal."""
    if sys.platform == "win32":
        return False
    try:
        return os.tcgetpgrp(descriptor) != os.getpgrp()
    except OSError:  # not the terminal that started this process
        return False


@contextmanager
def keyboard(stdin: TextIO, *, echoes: bool) -> Iterator[None]:
    """Turn the echo of keys on or off inside the block. Echoed keys would break into an answer that is being drawn.

    Text typed ahead stays in the terminal's buffer for the next prompt.
    """
    mode = terminal_mode(stdin)
    if sys.platform == "win32" or mode is None:
        yield
        return
    import termios

    new_mode = [*mode]
    if echoes:
        new_mode[_INPUT_MODES] |= termios.ICRNL
        new_mode[_LOCAL_MODES] |= termios.ECHO | termios.ICANON
    else:
        new_mode[_LOCAL_MODES] &= ~termios.ECHO
    restore_terminal_mode(stdin, new_mode)
    try:
        with Suspendable(lambda: restore_terminal_mode(stdin, mode), lambda: restore_terminal_mode(stdin, new_mode)):
            yield
    finally:
        restore_terminal_mode(stdin, mode)


def _wait_for_input(stdin: TextIO) -> None:
    while not select.select([stdin], [], [], SIGNAL_SECONDS)[0]:
        pass


def read_line(stdin: TextIO) -> str:
    """Return the next line, "" at the end of input. Ctrl-C ends the wait, even as the question appears."""
    if terminal_mode(stdin) is not None:
        _wait_for_input(stdin)
    return stdin.readline()


def read_key(stdin: TextIO) -> str:
    """Return the next key, without Enter after it; "" at the end of input. Without a terminal it is the next line's."""
    mode = terminal_mode(stdin)
    if sys.platform == "win32":
        import msvcrt

        return msvcrt.getwch()
    if mode is None:
        return stdin.readline()[:1]
    import termios

    new_mode = [*mode]
    new_mode[_LOCAL_MODES] &= ~(termios.ECHO | termios.ICANON)
    restore_terminal_mode(stdin, new_mode)
    try:
        with Suspendable(lambda: restore_terminal_mode(stdin, mode), lambda: restore_terminal_mode(stdin, new_mode)):
            _wait_for_input(stdin)
            return os.read(stdin.fileno(), 1).decode("utf-8", "replace")
    finally:
        restore_terminal_mode(stdin, mode)


class Suspendable:
    """A display that a stopped process must not leave on the terminal. Use it in a `with`; they can be nested.

    Args:
        pause: erases the display, and resets terminal modes.
        resume: sets the modes again, also after a stop without notice (SIGSTOP); may be called twice.
    """

    def __init__(self, pause: Callable[[], None], resume: Callable[[], None] = lambda: None) -> None:
        self._pause, self._resume = pause, resume
        self._before: dict[int, Any] = {}
        self._is_writing = self._must_stop = False

    def __enter__(self) -> Suspendable:
        is_main = threading.current_thread() is threading.main_thread()
        if sys.platform != "win32" and is_main and signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            self._before = {signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._on_stop)}
            self._before[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._on_continue)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Delay a stop until the end of the block, in which the terminal is between two states."""
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False
            if sys.platform != "win32" and self._must_stop:
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
    """Stop this process until it is continued. Without a shell that could continue it, the system stops nothing."""
    if sys.platform != "win32":
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)

"""The input mode of the terminal: read, restored, without echo during an answer, with echo at a question.

Owns termios; must not know what is typed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from llmrun.ui.terminal.suspend import Suspendable

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

"""The terminal's input mode: remembered, put back, and quiet while an answer is drawn.

Owns termios; must not know what is typed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmrun.ui.terminal.output import Output

_LOCAL_MODES = 3  # index of the local modes in what tcgetattr() gives


def terminal_mode(output: Output) -> list[Any] | None:
    """How the terminal at stdin is set; None where there is none."""
    try:
        import termios

        return termios.tcgetattr(output.stdin.fileno())
    except (ImportError, OSError, ValueError):  # Windows, or no real terminal
        return None
    except termios.error:
        return None


def restore_terminal_mode(output: Output, mode: list[Any]) -> None:
    """Set the terminal as it was."""
    import termios

    try:
        descriptor = output.stdin.fileno()
        if termios.tcgetattr(descriptor) != mode:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
    except (OSError, ValueError, termios.error):  # the terminal is gone
        return


@contextmanager
def quiet_keyboard(output: Output) -> Iterator[None]:
    """Inside, keys are not echoed into the text on the screen; what is typed ahead waits for the next prompt."""
    mode = terminal_mode(output) if output.stdin_is_terminal else None
    if mode is None:
        yield
        return
    import termios

    silent = [*mode]
    silent[_LOCAL_MODES] &= ~termios.ECHO
    restore_terminal_mode(output, silent)
    try:
        yield
    finally:
        restore_terminal_mode(output, mode)

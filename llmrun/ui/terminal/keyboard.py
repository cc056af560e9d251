"""The terminal's input mode: remembered, put back, quiet while an answer is drawn, and heard at a question.

Owns termios; must not know what is typed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmrun.ui.terminal.suspend import Suspendable

if TYPE_CHECKING:
    from llmrun.ui.terminal.output import Output

_INPUT_MODES, _LOCAL_MODES = 0, 3  # indices in what tcgetattr() gives


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
def keyboard(output: Output, *, echoes: bool) -> Iterator[None]:
    """Inside, lines are read and keys are shown, or not: while an answer is drawn they would break into it.

    What is typed ahead waits for the next prompt.
    """
    mode = terminal_mode(output) if output.stdin_is_terminal else None
    if mode is None:
        yield
        return
    import termios

    wanted = [*mode]
    if echoes:
        wanted[_INPUT_MODES] |= termios.ICRNL
        wanted[_LOCAL_MODES] |= termios.ECHO | termios.ICANON
    else:
        wanted[_LOCAL_MODES] &= ~termios.ECHO
    restore_terminal_mode(output, wanted)
    try:
        with Suspendable(lambda: restore_terminal_mode(output, mode), lambda: restore_terminal_mode(output, wanted)):
            yield
    finally:
        restore_terminal_mode(output, mode)

"""The frame of the command line: signals, and the one place that turns errors into messages and exit codes."""

from __future__ import annotations

import atexit
import gc
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from llmrun.cli.pages import page
from llmrun.errors import CancelledError, DiskFullError, LlmrunError, OutOfMemoryError, ResourceError, TerminatedError
from llmrun.ui.terminal.output import FULL, Output, drop_output

_COMPLETE = "_LLMRUN_COMPLETE"  # set by a shell that wants completions

ENDING = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))  # the terminal was closed
_CLEANUP_SECONDS = 1.0


def run() -> NoReturn:
    """Run the command in sys.argv and end the process with its exit code."""
    statuses: list[int] = []
    atexit.register(_end_by_signal, statuses)  # the first one registered is called last
    gc.freeze()
    gc.enable()
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has the second one ignored
            signal.signal(number, interrupt)
    arguments, debug = _without_debug(sys.argv[1:])
    try:
        text = page(arguments) if _COMPLETE not in os.environ else None
        if text is not None:
            print(text, flush=True)  # noqa: T201
            status = 0
        else:
            from llmrun.cli.app import call  # slow: a page needs no command

            status = call(arguments)
    except LlmrunError as error:
        interrupt.is_over = True  # one more Ctrl-C would only add a traceback
        status = _report(error, debug=debug)
    except BrokenPipeError:
        drop_output()  # who reads no further has what they wanted
        status = 0
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        drop_output()  # Typer calls it a failure
        status = 0
    except Exception as error:  # the outermost handler: whatever else happens is said in one line
        explained = _explained(error)
        if isinstance(explained, DiskFullError):
            drop_output()  # what is left of it can't be written either
        status = _report(explained, debug=debug)
    _ignore_signals()  # Python would go back to their defaults while it ends
    gc.freeze()  # the interpreter's last collections would take longer than most commands' own work
    statuses.append(status)
    sys.exit(status)


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Return the arguments without --debug, and whether it was given."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [word for word in arguments[:end] if word != "--debug"]
    return options + arguments[end:], len(options) < end


def _explained(error: Exception) -> LlmrunError:
    if isinstance(error, OSError):
        if error.filename is None and error.errno in FULL:
            return DiskFullError("the output can't be written", why="the disk is full")
        what = f"can't use {str(error.filename)!r}" if error.filename else "the system refused something"
        return ResourceError(what, why=error.strerror or str(error), hint="--debug shows where")
    if isinstance(error, MemoryError):
        return OutOfMemoryError("there is not enough memory", hint="close other programs")
    return LlmrunError(f"{type(error).__name__}: {error}", hint="--debug shows where")


def _report(error: LlmrunError, *, debug: bool) -> int:
    """Print an error; return its exit status."""
    from llmrun.config import load_settings

    with suppress(LlmrunError):  # an invalid variable
        debug = debug or load_settings().debug
    if debug:
        import traceback

        traceback.print_exc()
    if not isinstance(error, CancelledError | TerminatedError):
        Output(json="--json" in sys.argv).error(error)
    return error.exit_status


def _ignore_signals() -> None:
    for number in (signal.SIGINT, *ENDING):
        signal.signal(number, signal.SIG_IGN)


def _end_by_signal(statuses: Sequence[int]) -> None:
    """After Ctrl-C, end by the signal itself: a shell's loop goes on after a program that ends with a status.

    The shell shows the same status, 130.
    """
    if CancelledError.exit_status not in statuses or sys.platform == "win32":
        return
    with suppress(OSError, ValueError):  # the reader is gone
        sys.stdout.flush()
        sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


class Interrupt:
    """A signal handler that raises an error, which unwinds the command.

    A second signal is ignored for a second, so that an impatient user does not interrupt what the first one cleans up.
    Later ones raise again: the first may have been caught, or its cleanup may hang.

    Attributes:
        is_over: the command has ended, so that no signal raises any more.
    """

    is_over = False

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._raised_at = clock, -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise CancelledError for SIGINT, else TerminatedError."""
        if self.is_over or self._clock() - self._raised_at < _CLEANUP_SECONDS:
            return
        self._raised_at = self._clock()
        if number == signal.SIGINT:
            raise CancelledError("stopped by Ctrl-C")
        raise TerminatedError(f"stopped by {signal.Signals(number).name}")

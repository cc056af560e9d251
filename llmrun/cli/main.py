"""The command line's frame: the app, its start page, and the one place where errors become words and exit codes."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer

from llmrun.cli.commands import register
from llmrun.cli.completion import completes_model, mend_words, typed_command
from llmrun.config import load_settings
from llmrun.errors import CancelledError, DiskFullError, LlmrunError, OutOfMemoryError, ResourceError, TerminatedError
from llmrun.ui.terminal.output import Output, quiet_broken_pipe

START_PAGE = """\
llmrun runs large language models on this machine.

  llmrun run smollm2 "Why is the sky blue?"   one answer
  llmrun chat smollm2                         a conversation
  llmrun list --all                           models to choose from
  llmrun doctor                               what this machine can do
  llmrun --help                               every command\
"""

app = typer.Typer(
    name="llmrun",
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run large language models on this machine.",
    epilog='Start with: llmrun run smollm2 "Why is the sky blue?"',
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"llmrun {version('llmrun')} (llama-cpp-python {version('llama-cpp-python')})")  # noqa: T201
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print versions and leave."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Run large language models on this machine."""
    if context.invoked_subcommand is None:
        print(START_PAGE)  # noqa: T201


def run() -> NoReturn:
    """Run the command in sys.argv and end the process with its exit code."""
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, _cancel)
    signal.signal(signal.SIGTERM, _terminate)
    mend_words(os.environ)
    try:
        typed = typed_command(sys.argv[1:], os.environ)
        register(app, typed, completes_model=completes_model(os.environ))
        app()
        status = 0
    except LlmrunError as error:
        status = _report(error)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        quiet_broken_pipe()  # Typer calls it a failure, but who reads no further has what they wanted
        status = 0
    except Exception as error:  # the outermost handler: whatever else happens is said in one line
        status = _report(_explained(error))
    _ignore_signals()  # Python would go back to their defaults while it ends
    sys.exit(status)


def _explained(error: Exception) -> LlmrunError:
    if isinstance(error, OSError):
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return DiskFullError("the output can't be written", why="the disk is full")
        what = f"can't use {str(error.filename)!r}" if error.filename else "the system refused something"
        return ResourceError(what, why=error.strerror or str(error), hint="--debug shows where")
    if isinstance(error, MemoryError):
        return OutOfMemoryError("there is not enough memory", hint="close other programs")
    return LlmrunError(f"{type(error).__name__}: {error}", hint="--debug shows where")


def _report(error: LlmrunError) -> int:
    """Say what went wrong; gives the exit status."""
    if "--debug" in sys.argv or load_settings().debug:
        import traceback

        traceback.print_exc()
    if not isinstance(error, CancelledError | TerminatedError):
        Output(json="--json" in sys.argv).error(error)
    return error.exit_status


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _cancel(number: int, frame: FrameType | None) -> None:
    _ignore_signals()
    raise CancelledError("stopped by Ctrl-C")


def _terminate(number: int, frame: FrameType | None) -> None:
    _ignore_signals()
    raise TerminatedError("stopped by SIGTERM")

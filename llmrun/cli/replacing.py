"""The one rule for output files: an existing file is replaced only after confirmation."""

from __future__ import annotations

from pathlib import Path

from llmrun.errors import CancelledError, UsageError
from llmrun.storage import check_target
from llmrun.ui.terminal.output import Output


def check_output_file(output: Output, target: Path, *, yes: bool, hint: str = "-y replaces it") -> None:
    """Raise unless a file may be written. Call this before any work is done.

    Pipes and devices are always allowed.

    Args:
        yes: replace a file without asking.
        hint: what to type if there is no terminal to ask on.

    Raises:
        UsageError: the folder does not exist, or the file exists and there is no terminal to ask on.
        ResourceError: the folder is not writable.
        CancelledError: the answer was no.
    """
    check_target(target)
    if yes or not target.is_file():
        return
    if not output.can_ask:
        raise UsageError(f"{str(target)!r} exists already", why="there is no terminal to ask on", hint=hint)
    if not output.confirm(f"{target} exists already. Replace it?"):
        raise CancelledError("nothing was written")

"""The one rule for files that a command is told to write: what is there already is replaced only after a yes.

Owns the question and the refusal; must not know what is in the files.
"""

from __future__ import annotations

from pathlib import Path

from llmrun.errors import CancelledError, UsageError
from llmrun.storage import check_target
from llmrun.ui.terminal.output import Output


def check_output_file(output: Output, target: Path, *, yes: bool, hint: str = "-y replaces it") -> None:
    """Raise unless a file may be written there. Call this before any work is done.

    A pipe or a device holds nothing that could be lost.

    Args:
        yes: replace a file without asking.
        hint: what to type where nobody can be asked.

    Raises:
        UsageError: there is no such folder, or there is a file and nobody can be asked.
        ResourceError: nothing can be written in the folder.
        CancelledError: the answer was no.
    """
    check_target(target)
    if yes or not target.is_file():
        return
    if not output.can_ask:
        raise UsageError(f"{str(target)!r} is there already", why="nobody can be asked here", hint=hint)
    if not output.confirm(f"{target} is there already. Replace it?"):
        raise CancelledError("nothing was written")

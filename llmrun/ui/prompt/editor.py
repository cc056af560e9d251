"""The user's own editor, for a text that is too long for a prompt."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from llmrun.errors import ResourceError, UsageError

_DEFAULTS = ("editor", "nano", "vi")


def edit(text: str, environment: Mapping[str, str] = os.environ, *, name: str = "message.md") -> str:
    """Return the text as the user leaves it in the editor, without a newline at the end.

    Args:
        text: initial text. It is in a private folder as long as the editor is open, with all files of the editor.
        environment: VISUAL or EDITOR names the editor, with its options.
        name: of the file in the editor, which tells its format.

    Raises:
        UsageError: there is no editor, it can't be started, or it reports a failure.
        ResourceError: the text can't be written, or was removed.
    """
    command = _editor(environment)
    try:
        with tempfile.TemporaryDirectory(prefix="llmrun-") as folder:
            path = Path(folder) / name
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(f"{text}\n".encode("utf-8", "replace") if text else b"")
            _run([*command, str(path)])
            edited = path.read_bytes()
    except OSError as error:
        raise ResourceError("the text can't be edited", why=error.strerror or str(error)) from None
    return edited.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")


def _editor(environment: Mapping[str, str]) -> list[str]:
    for name in ("VISUAL", "EDITOR"):
        if command := environment.get(name, "").strip():
            try:
                return shlex.split(command)
            except ValueError as error:
                raise UsageError(f"{name} is not a command line", why=f"{command}: {error}") from None
    default = next(filter(shutil.which, _DEFAULTS), None)
    if default is None:
        raise UsageError("there is no editor", hint="set EDITOR to your editor")
    return [default]


def _run(command: list[str]) -> None:
    try:
        status = subprocess.call(command)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"the editor {command[0]} can't be started", why=why, hint="set EDITOR") from None
    if status:
        raise UsageError(f"the editor {command[0]} ended with status {status}", why="the text is as it was before")

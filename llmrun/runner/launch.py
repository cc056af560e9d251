"""The start of the engine process, before anything else is imported.

Must not know frames. Imports none of our modules: the sooner the engine's interpreter starts, the more of its own
imports run beside the front's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

ENGINE = (sys.executable, "-c", "import gc; gc.disable(); from llmrun.engine.main import main; main()")


class EngineHandle(NamedTuple):
    """A process with pipes at stdin and stdout."""

    process: subprocess.Popen[bytes]
    log: IO[bytes] | None  # its stderr; None if that is our own


def launch(
    command: Sequence[str] = ENGINE, *, verbose: bool = False, environment: Mapping[str, str] | None = None
) -> EngineHandle:
    """Start an engine.

    Args:
        command: another program instead, for tests.
        verbose: write its log to our stderr instead of a nameless file.
        environment: variables in addition to ours.
    """
    log = None if verbose else _nameless_file()
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log if log or verbose else subprocess.DEVNULL,
        bufsize=0,
        cwd=os.path.abspath(os.sep),  # noqa: PTH100 - nothing in the user's folder may shadow a module
        env={**os.environ, **environment} if environment else None,
    )
    return EngineHandle(process, log)


def _nameless_file() -> IO[bytes] | None:
    """Return a temporary file; None if nothing can be written, so that an engine's last words are lost."""
    try:
        if sys.platform == "linux":  # in memory, which spares every start the import
            return open(os.memfd_create("llmrun-engine-log"), "w+b")  # noqa: PTH123 - it has no path
        import tempfile

        return tempfile.TemporaryFile()
    except OSError:
        return None


has_prestarted = False
"""An engine was started before its command was known."""
_prestarted: EngineHandle | None = None


def prestart() -> None:
    """Start an engine before its command is known."""
    global _prestarted, has_prestarted
    _prestarted, has_prestarted = launch(), True


def take_prestarted() -> EngineHandle | None:
    """Return the prestarted engine, once."""
    global _prestarted
    launched, _prestarted = _prestarted, None
    return launched

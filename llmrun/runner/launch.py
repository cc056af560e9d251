"""Starts the engine process, before anything else is imported.

Owns the command line and the descriptors of the engine; must not know frames. Imports none of our modules: the sooner
the engine's interpreter starts, the more of its own imports happen beside the front's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

ENGINE = (sys.executable, "-c", "import gc; gc.disable(); from llmrun.engine.main import main; main()")


class EngineHandle(NamedTuple):
    """A process with pipes at stdin and stdout. log is its stderr, None when that is our own."""

    process: subprocess.Popen[bytes]
    log: IO[bytes] | None


def launch(
    command: Sequence[str] = ENGINE, *, verbose: bool = False, environment: Mapping[str, str] | None = None
) -> EngineHandle:
    """Start an engine.

    Args:
        command: what to start in its place, for tests.
        verbose: its log goes to our stderr instead of a nameless file.
        environment: variables that it gets besides ours.
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
    """A temporary file; None where nothing can be written, and then an engine's last words are lost."""
    try:
        if sys.platform == "linux":  # in memory, which spares every start the import
            return open(os.memfd_create("llmrun-engine-log"), "w+b")  # noqa: PTH123 - it has no path
        import tempfile

        return tempfile.TemporaryFile()
    except OSError:
        return None


has_prestarted = False
"""Whether an engine was started before anybody knew what for."""
_prestarted: EngineHandle | None = None


def prestart() -> None:
    """Start an engine before anybody knows what for."""
    global _prestarted, has_prestarted
    _prestarted, has_prestarted = launch(), True


def take_prestarted() -> EngineHandle | None:
    """The prestarted engine, once."""
    global _prestarted
    launched, _prestarted = _prestarted, None
    return launched

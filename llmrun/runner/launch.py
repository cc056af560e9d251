"""The start of the engine process, before anything else is imported.

Must not know frames. Imports none of our modules: the sooner the engine's interpreter starts, the more of its own
imports run beside the front's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llmrun.errors import LlmrunError

ENGINE = (sys.executable, "-c", "import gc; gc.disable(); from llmrun.engine.start import main; main()")


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

    Raises:
        ResourceError: the system refuses another process or pipe.
    """
    try:
        return _start(command, verbose, environment)
    except OSError as error:
        hint = "close other programs; ulimit -a shows the limits"
        raise _resource_error()("no process can be started", why=error.strerror or str(error), hint=hint) from None


def _resource_error() -> type[LlmrunError]:
    from llmrun.errors import ResourceError  # only for an error, see above

    return ResourceError


def _start(command: Sequence[str], verbose: bool, environment: Mapping[str, str] | None) -> EngineHandle:
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


_has_guess = False


def prestart() -> None:
    """Start an engine before its command is known; if the system refuses, that is reported when one is needed."""
    global _prestarted, has_prestarted
    try:
        _prestarted, has_prestarted = launch((*ENGINE, "preload")), True
    except _resource_error():
        _prestarted = None


def preload(path: str) -> None:
    """Let the prestarted engine begin to load the weights that Load will probably name; failures are ignored.

    Args:
        path: of the GGUF file, absolute; "" for no guess.
    """
    global _has_guess
    if _prestarted is None or _has_guess or "\n" in path:
        return
    _has_guess = True
    assert _prestarted.process.stdin is not None
    with suppress(OSError):  # it died; the first command reports it
        _prestarted.process.stdin.write(os.fsencode(path) + b"\n")


def take_prestarted() -> EngineHandle | None:
    """Return the prestarted engine, once."""
    global _prestarted
    preload("")
    launched, _prestarted = _prestarted, None
    return launched

"""A tool process whose descendants end with it or with the chat: on Linux by a parent of its own, see subreaper.py.

Elsewhere the chat ends the process group, and on Windows the process alone.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from contextlib import suppress

LEAVE_SECONDS = 6  # for an MCP server to end


def run(module: str) -> None:
    """Run main() of a module of this folder, guarded if the system allows that."""
    if sys.platform == "linux" and is_possible():
        from llmrun.chat.tools import subreaper

        subreaper.start(LEAVE_SECONDS)
    importlib.import_module(f"llmrun.chat.tools.{module}").main()


def is_possible() -> bool:
    """Return whether the system supports the guard: Linux 5.3 or newer."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def end(pid: int) -> None:
    """End a process of run(), and all that it started. Safe in a signal handler."""
    with suppress(ProcessLookupError):
        if sys.platform == "win32" or is_possible():
            os.kill(pid, signal.SIGTERM)
        else:
            os.killpg(pid, signal.SIGKILL)

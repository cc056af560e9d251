"""The parent of a tool process: when the tool process or the chat ends, all processes that the tools started are ended.

Owns the descendants: as a child subreaper it becomes the parent of orphans, also of those in other sessions. Linux
only; elsewhere the chat ends the process group. Must not know tools, and runs none.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

LEAVE_SECONDS = 6  # for an MCP server to end
_END_SECONDS = 5  # a process in an uninterruptible call may outlive SIGKILL
_PR_SET_CHILD_SUBREAPER = 36  # prctl.h


class _Stopped(Exception):  # noqa: N818 - a signal, not an error
    """SIGTERM was received."""


def run(module: str) -> None:
    """Run main() of a module of this folder, guarded if the system allows that."""
    if is_possible():
        _guard()
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
        if is_possible():
            os.kill(pid, signal.SIGTERM)
        else:
            os.killpg(pid, signal.SIGKILL)


def _guard() -> None:
    """Fork. The child returns and runs the tools; the parent never returns."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.setsid()  # Ctrl-C is for the chat
    signal.signal(signal.SIGTERM, _stop)
    child = os.fork()
    if child:
        _watch(child)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop(*_: object) -> NoReturn:
    raise _Stopped


def _watch(child: int) -> NoReturn:
    """Wait for the end of the child or of the chat, end all descendants, and exit with the child's status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the pipe to the chat ends with the child
    with suppress(_Stopped):
        ended = os.pidfd_open(child)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(0, 0)  # the chat's end is a hangup; what it says is the child's
        if all(descriptor != ended for descriptor, _ in poll.poll()):
            poll.unregister(0)
            poll.poll(LEAVE_SECONDS * 1000)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _exit_as(_end_descendants(child))


def _end_descendants(child: int) -> int:
    """Kill all descendants until there are none; return the child's wait status."""
    import psutil  # type: ignore[import-untyped,unused-ignore]

    status, ends = signal.SIGKILL.value, time.monotonic() + _END_SECONDS
    with suppress(ChildProcessError):  # there are none
        while time.monotonic() < ends:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
            while (waited := os.waitpid(-1, os.WNOHANG))[0]:
                status = waited[1] if waited[0] == child else status
            time.sleep(0.01)
    return status


def _exit_as(status: int) -> NoReturn:
    """Exit with the wait status of another process, without a core dump of this one."""
    if os.WIFSIGNALED(status):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))

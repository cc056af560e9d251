"""The process around one that has tools: when that ends, or the chat, it ends everything that the tools have started.

Owns the descendants, wherever they went: as a child subreaper it becomes the parent of orphans, also of those in
sessions of their own. Linux only; elsewhere the chat ends the process group. Must not know tools, and runs none.
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

LEAVE_SECONDS = 6
"""What an MCP server has to end in."""
_END_SECONDS = 5  # a process in an uninterruptible call may outlive SIGKILL
_PR_SET_CHILD_SUBREAPER = 36  # prctl.h


class _Stopped(Exception):  # noqa: N818 - a signal, not an error
    """SIGTERM came."""


def run(module: str) -> None:
    """Run main() of a module of this folder, guarded where the system allows it."""
    if is_possible():
        _guard()
    importlib.import_module(f"llmrun.chat.tools.{module}").main()


def is_possible() -> bool:
    """Return whether the system has what a guard needs: Linux 5.3."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def end(pid: int) -> None:
    """End a process that run() is in, and all that it started. Safe in a signal handler."""
    with suppress(ProcessLookupError):
        if is_possible():
            os.kill(pid, signal.SIGTERM)
        else:
            os.killpg(pid, signal.SIGKILL)


def _guard() -> None:
    """Fork: the child returns, and has the tools; the parent never returns."""
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
    """Wait for the end of the child or of the chat, end all descendants, and exit as the child did."""
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

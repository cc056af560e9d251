"""The parent of a tool process on Linux, which ends all descendants when the tool process or the chat ends.

As a child subreaper it becomes the parent of orphans, also of those in other sessions.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

from llmrun.system import disable_core_dumps

assert sys.platform == "linux"

_END_SECONDS = 5  # a process in an uninterruptible call may outlive SIGKILL
_PR_SET_CHILD_SUBREAPER = 36  # prctl.h


class _Stopped(Exception):  # noqa: N818 - a signal, not an error
    """SIGTERM was received."""


def start(leave_seconds: float) -> None:
    """Fork. The child returns and runs the tools; the parent never returns.

    Args:
        leave_seconds: time for the child after the end of the chat.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.setsid()  # Ctrl-C is for the chat
    signal.signal(signal.SIGTERM, _stop)
    child = os.fork()
    if child:
        _watch(child, leave_seconds)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop(*_: object) -> NoReturn:
    raise _Stopped


def _watch(child: int, leave_seconds: float) -> NoReturn:
    """Wait for the end of the child or of the chat, end all descendants, and exit with the child's status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the pipe to the chat ends with the child
    with suppress(_Stopped):
        ended = os.pidfd_open(child)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(0, 0)  # the chat's end is a hangup; what it says is the child's
        if all(descriptor != ended for descriptor, _ in poll.poll()):
            poll.unregister(0)
            poll.poll(leave_seconds * 1000)
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
        disable_core_dumps()
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))

"""Differences between operating systems: locks of files, waiting for a pipe, processor time, core dumps, files of the
kernel.

Linux has everything here. On Windows, files are not locked; it refuses by itself to remove a file
that is in use.
"""

from __future__ import annotations

import os
import select
import selectors
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import socket

SIGNAL_SECONDS = 0.1
"""The longest wait of the main thread in one system call: a signal that comes just before the call does not interrupt
it, and Python handles the signal only after it."""
_READ_BYTES = 1 << 16


def file_identity(path: Path) -> str:
    """Return what changes when a file is replaced or written: path, inode, size and time. Raises OSError."""
    status = path.stat()
    return f"{path.resolve()} {status.st_ino} {status.st_size} {status.st_mtime_ns}"


def lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool | None:
    """Lock a file until it is closed.

    Args:
        shared: with other readers.
        wait: for other processes, without a limit.

    Returns:
        False if another process holds the lock, None where files can't be locked: Windows, some network disks.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def lock_byte(descriptor: int, byte: int) -> bool | None:
    """Lock one byte of a file for this process, as lock() does, until unlock_byte()."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def unlock_byte(descriptor: int, byte: int) -> None:
    if sys.platform != "win32":
        import fcntl

        with suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)


class PipeReader:
    """The reading end of a pipe from another process.

    Args:
        is_copied: a thread copies the pipe to a socket, because Windows can wait for sockets only.
    """

    def __init__(self, pipe: IO[bytes], *, is_copied: bool = sys.platform == "win32") -> None:
        self._pipe = pipe
        self._socket = _copied(pipe) if is_copied else None
        if self._socket is not None:
            self._socket.setblocking(False)
        elif sys.platform != "win32":
            os.set_blocking(pipe.fileno(), False)
        # Unlike the default one, it has no descriptor of its own.
        self._selector = getattr(selectors, "PollSelector", selectors.SelectSelector)()
        self._selector.register(self.fileno(), selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return the descriptor that is readable when bytes have come."""
        return (self._socket or self._pipe).fileno()

    def read(self, seconds: float) -> bytes | None:
        """Return the next bytes, b"" at the end of the pipe, None if none came in this time.

        Raises:
            OSError: it can't be read.
            ValueError: it is closed.
        """
        if self._pipe.closed:  # the descriptor may be another file's by now
            raise ValueError("the pipe is closed")
        ends = time.monotonic() + seconds
        while seconds > 0 and not self._selector.select(min(seconds, SIGNAL_SECONDS)):
            seconds = ends - time.monotonic()
        try:
            return self._socket.recv(_READ_BYTES) if self._socket else os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return None


def can_write(descriptor: int, n_bytes: int) -> bool:
    """Return True if a pipe takes these bytes without blocking, False if it may block."""
    if sys.platform == "win32" or n_bytes > select.PIPE_BUF:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


def _copied(pipe: IO[bytes]) -> socket.socket:
    """Return a socket that receives the bytes of a pipe, copied by a thread."""
    import socket  # other systems' starts need none

    reading, writing = socket.socketpair()

    def copy() -> None:
        with closing(writing), suppress(OSError, ValueError):  # either end is closed
            while data := os.read(pipe.fileno(), _READ_BYTES):
                writing.sendall(data)

    threading.Thread(target=copy, daemon=True).start()
    return reading


def disable_core_dumps() -> None:
    """Disable core dumps of this process, which would be gigabytes."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def processor_seconds(process: int, *, is_main_thread: bool = False) -> float | None:
    """Return the processor time that a process, or its main thread alone, has used; None if it can't be read.

    Only on Linux the time of the main thread is known.
    """
    if sys.platform == "linux":
        folder = f"{process}/task/{process}" if is_main_thread else f"{process}"
        try:
            with open(f"/proc/{folder}/stat", "rb") as file:  # noqa: PTH123 - ten times a second
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    import psutil  # type: ignore[import-untyped,unused-ignore]

    try:
        times = psutil.Process(process).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def read_text(path: Path, limit: int = -1) -> str:
    """Return up to limit bytes of a file as text, without surrounding blanks; "" if the file can't be read."""
    try:
        with path.open("rb", buffering=0) as file:
            return (file.read(limit) or b"").decode(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> float | None:
    """Return the number in a file, None if there is none."""
    try:
        return float(read_text(path, 64))
    except ValueError:
        return None


def usable_cpus() -> list[int]:
    """Return the numbers of the hardware threads that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def busy_seconds() -> float | None:
    """Return the seconds that this process's cores have computed since some time, for all programs together.

    Programs of a lower priority don't count: they make way. None where the system does not tell.
    """
    if sys.platform != "linux":
        return _busy_elsewhere()
    cores = {f"cpu{number}" for number in usable_cpus()}
    seconds = 0
    for line in read_text(Path("/proc/stat")).splitlines():
        name, *fields = line.split()
        if name == "intr":
            break  # after the processors, and long
        if name in cores:
            user, _, system, _, _, *interrupts = map(int, fields[:8])
            seconds += user + system + sum(interrupts)
    return seconds / os.sysconf("SC_CLK_TCK") if seconds else None


def _busy_elsewhere() -> float | None:
    import psutil  # type: ignore[import-untyped,unused-ignore]

    times = psutil.cpu_times()
    return float(times.user + times.system)


def user_path(name: str) -> Path:
    """Return the path of a name as a user types it: a leading ~ is the home, but not that of ./~."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 - a Path loses the ./ before the ~

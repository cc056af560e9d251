"""Who has which saved chat open: one file, the byte of its id locked for each chat.

The system drops a lock when its process ends, however that happens, and nothing is left to clean up. Where files
can't be locked (Windows, some network disks) nobody is known to have anything open.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class Locks:
    """The locks of this process. One object for one file: closing a second would drop the locks of the first.

    Raises:
        OSError: the file can't be made.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._held: set[int] = set()

    def claim(self, session: int) -> bool:
        """Say that a chat is open here; False if it is open in another process."""
        if session not in self._held and not self._lock(session):
            return False
        self._held.add(session)
        return True

    def release(self, session: int) -> None:
        """It is not open here any more."""
        if session in self._held:
            self._held.remove(session)
            self._unlock(session)

    def is_free(self, session: int) -> bool:
        """Whether no other process has a chat open."""
        if session in self._held:
            return True
        free = self._lock(session)
        if free:
            self._unlock(session)
        return free

    def close(self) -> None:
        """Release everything."""
        os.close(self._descriptor)

    def _lock(self, byte: int) -> bool:
        try:
            import fcntl
        except ImportError:
            return True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # this disk has no locks
            return True
        return True

    def _unlock(self, byte: int) -> None:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)


class NoLocks(Locks):
    """For a store that no other process can see."""

    def __init__(self) -> None:
        self._held: set[int] = set()

    def close(self) -> None:
        """There is nothing to release."""

    def _lock(self, byte: int) -> bool:
        return True

    def _unlock(self, byte: int) -> None:
        pass

"""Locks of open chats across processes: one file, in which the byte at a chat's id is locked.

The system drops a lock when its process ends, so nothing is left to clean up. Where files can't be locked (Windows,
some network disks), every chat counts as free.
"""

from __future__ import annotations

import os
from pathlib import Path

from llmrun.system import lock_byte, unlock_byte


class Locks:
    """The locks of this process. One object for one file: closing a second would drop the locks of the first.

    Raises:
        OSError: the file can't be made.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._held: set[int] = set()

    def claim(self, session: int) -> bool:
        """Lock a chat for this process; return False if another process has it open."""
        if session not in self._held and not self._lock(session):
            return False
        self._held.add(session)
        return True

    def release(self, session: int) -> None:
        if session in self._held:
            self._held.remove(session)
            self._unlock(session)

    def is_free(self, session: int) -> bool:
        """Return whether no other process has the chat open."""
        if session in self._held:
            return True
        free = self._lock(session)
        if free:
            self._unlock(session)
        return free

    def close(self) -> None:
        os.close(self._descriptor)

    def _lock(self, byte: int) -> bool:
        return lock_byte(self._descriptor, byte) is not False

    def _unlock(self, byte: int) -> None:
        unlock_byte(self._descriptor, byte)


class NoLocks(Locks):
    """Locks of a store in memory, which no other process can see."""

    def __init__(self) -> None:
        self._held: set[int] = set()

    def close(self) -> None:
        """Do nothing."""

    def _lock(self, byte: int) -> bool:
        return True

    def _unlock(self, byte: int) -> None:
        pass

"""The file of what was typed in earlier chats, which several chats may use at the same time.

Owns that file; must not know what a message means. Entries are in prompt_toolkit's own form: a line with the time,
then each line of the entry behind a plus. Imported only when a user types, for it imports prompt_toolkit.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from prompt_toolkit.history import History, InMemoryHistory

MOST_BYTES = 4 << 20
"""When the file is longer than this, a new chat keeps its newest half."""
LONGEST_BYTES = 256 << 10
"""A longer entry, which must have been pasted, is remembered in its own chat only."""


def open_history(path: Path | None) -> History:
    """What was typed before.

    Args:
        path: of the file; made with mode 0600 in a directory of mode 0700. None, or a place that can't be written,
            keeps the history of this chat only.
    """
    if path is None:
        return PrivateHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
        _shorten(path)
    except OSError:  # a home that can't be written is no reason not to chat
        return PrivateHistory()
    return SharedHistory(path)


class PrivateHistory(InMemoryHistory):
    """Of this chat only. What begins with a space is not remembered: that is for secrets, as in a shell."""

    def append_string(self, string: str) -> None:
        """Remember what was typed."""
        if not string.startswith(" "):
            super().append_string(string)


class SharedHistory(History):
    """In a file that every chat appends to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def append_string(self, string: str) -> None:
        """Remember what was typed, unless it begins with a space."""
        if not string.startswith(" "):
            super().append_string(string)

    def load_history_strings(self) -> Iterable[str]:
        """The entries, the newest first."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return []
        return reversed(_entries(data))

    def store_string(self, string: str) -> None:
        """Append an entry; a full disk loses it and nothing else."""
        lines = "".join(f"+{line}\n" for line in string.split("\n"))
        entry = f"\n# {datetime.now()}\n{lines}".encode("utf-8", "replace")
        if len(entry) > LONGEST_BYTES:
            return
        try:
            with self._path.open("ab", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(entry)  # all at once: entries of two chats never mix
        except OSError:
            return


def _entries(data: bytes) -> list[str]:
    """The entries in a history file, the oldest first."""
    entries: list[str] = []
    lines: list[str] = []
    for line in [*data.split(b"\n"), b""]:
        if line.startswith(b"+"):
            lines.append(line[1:].decode("utf-8", "replace"))
        elif lines:
            entries.append("\n".join(lines))
            lines = []
    return entries


def _shorten(path: Path) -> None:
    """Cut the oldest entries off a file that has grown long."""
    if path.stat().st_size <= MOST_BYTES:
        return
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        data = file.read()
        if len(data) > MOST_BYTES:  # another chat may have been faster
            _, boundary, newest = data[-MOST_BYTES // 2 :].partition(b"\n#")
            file.seek(0)
            file.write(boundary + newest)
            file.truncate()

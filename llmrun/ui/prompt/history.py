"""The history file of typed messages, which several chats may use at the same time.

Entries are in prompt_toolkit's form: a line with the time, then each line of the entry after a plus. Imports
prompt_toolkit, so it is imported only when a user types.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from prompt_toolkit.history import History, InMemoryHistory

from llmrun.system import lock

MAX_BYTES = 4 << 20  # of the file; a new chat keeps the newest half of a longer one
MAX_ENTRY_BYTES = 256 << 10  # a longer entry, which must have been pasted, is not written


def open_history(path: Path | None, unfolded: Callable[[str], str] = str) -> History:
    """Open the history.

    Args:
        path: made with mode 0600 in a directory of mode 0700. None, or an unwritable place, keeps the history of this
            chat only.
        unfolded: returns the whole text of an entry whose pastes are folded.
    """
    if path is None:
        return PrivateHistory(unfolded)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
        _shorten(path)
    except OSError:  # an unwritable home must not prevent a chat
        return PrivateHistory(unfolded)
    return SharedHistory(path, unfolded)


class PrivateHistory(InMemoryHistory):
    """A history of this chat only. Text that begins with a space is not remembered, as in a shell: for secrets."""

    def __init__(self, unfolded: Callable[[str], str] = str) -> None:
        super().__init__()
        self._unfolded = unfolded

    def append_string(self, string: str) -> None:
        if not string.startswith(" "):
            super().append_string(self._unfolded(string))


class SharedHistory(History):
    """A history in a file that every chat appends to."""

    def __init__(self, path: Path, unfolded: Callable[[str], str] = str) -> None:
        super().__init__()
        self._path, self._unfolded = path, unfolded

    def append_string(self, string: str) -> None:
        if not string.startswith(" "):
            super().append_string(self._unfolded(string))

    def load_history_strings(self) -> Iterable[str]:
        """Return the entries, newest first."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return []
        return reversed(_entries(data))

    def store_string(self, string: str) -> None:
        """Append an entry; with a full disk only the entry is lost."""
        lines = "".join(f"+{line}\n" for line in string.split("\n"))
        entry = f"\n# {datetime.now()}\n{lines}".encode("utf-8", "replace")
        if len(entry) > MAX_ENTRY_BYTES:
            return
        try:
            with self._path.open("ab", buffering=0) as file:
                lock(file.fileno(), wait=True)
                file.write(entry)  # all at once: entries of two chats never mix
        except OSError:
            return


def _entries(data: bytes) -> list[str]:
    """Return the entries of a history file, oldest first."""
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
    """Cut the oldest entries off a long file."""
    if path.stat().st_size <= MAX_BYTES:
        return
    with path.open("r+b") as file:
        lock(file.fileno(), wait=True)
        data = file.read()
        if len(data) > MAX_BYTES:  # another chat may have been faster
            _, boundary, newest = data[-MAX_BYTES // 2 :].partition(b"\n#")
            file.seek(0)
            file.write(boundary + newest)
            file.truncate()

"""The saved chats of one user: find, open, list, rename, delete, search and copy them.

Owns the shelf; must not know how a chat goes on (sessions.chat) or what a row looks like (sessions.rows).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from llmrun.chat.store import rows, search
from llmrun.chat.store.chat import SavedChat
from llmrun.chat.store.locks import Locks, NoLocks
from llmrun.chat.store.schema import FILE, SCHEMA
from llmrun.chat.store.search import Hit
from llmrun.chat.store.turns import Tree
from llmrun.errors import UsageError, did_you_mean
from llmrun.storage import Database


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A saved chat, as a list shows it.

    Attributes:
        id: a number that no other chat ever gets.
        name: unique, whatever its case.
        created, updated: seconds since 1970.
        turns: of the current branch.
        branches: how many there are.
        model: name of the one that answered last; "" before the first turn.
        first: what the first question begins with; the newest one, if it was edited.
    """

    id: int
    name: str
    created: float
    updated: float
    turns: int
    branches: int
    model: str
    first: str


class Sessions:
    """An open store; use it as a context manager or call close().

    Args:
        folder: where the file is kept, see folder_in(). Made where needed, for its owner alone. None keeps the
            chats in memory, and nothing on a disk.
        clock: seconds since 1970.

    Attributes:
        folder: where the file is kept; None for memory.
        note: a line to be shown once, such as that a damaged file was moved aside; "" for nothing.

    Raises:
        UsageError: the file is of a newer llmrun.
        ResourceError: it can't be read or written.
    """

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._database = Database(folder / FILE if folder else None, SCHEMA)
        self._connection, self.note = self._database.connection, self._database.note
        with self._database.explained():
            self._locks = _own(folder) if folder else NoLocks()
        self._clock = clock

    def all(self) -> list[SessionFacts]:
        """Every saved chat, the one used last first."""
        return self._facts("ORDER BY s.updated DESC, s.id DESC")

    def find(self, which: str = "") -> SessionFacts:
        """A chat by its name or id; the one used last for "".

        Raises:
            UsageError: there is none; names the near ones.
        """
        found = self._facts("ORDER BY s.updated DESC, s.id DESC LIMIT 1") if not which else self._named(which)
        if not found:
            raise self._no_such(which)
        return found[0]

    def new(self, name: str = "", *, system: str = "") -> SavedChat:
        """A chat that is saved from its first turn on.

        Args:
            name: to be given; made of the first question by default.
            system: prompt.

        Raises:
            UsageError: the name can't be one, or is taken.
        """
        if name:
            name = rows.checked_name(name)
            self._refuse_taken(name)
        return SavedChat(self._database, self._locks, self._clock, name=name, system=system)

    def open(self, which: str = "") -> SavedChat:
        """Go on with a chat; its `open_elsewhere` says whether another process has it, then only copy() helps.

        Raises:
            UsageError: there is no such chat.
        """
        return self._opened(self.find(which).id)

    def copy(self, which: str, name: str = "") -> SavedChat:
        """A new chat with everything that is in another one, opened. Its name is the other's with a number by default.

        Raises:
            UsageError: there is no such chat, or the name can't be one.
        """
        found = self.find(which)
        return self.add(self.tree(str(found.id)), name)

    def add(self, tree: Tree, name: str = "") -> SavedChat:
        """Save a whole chat under new ids, and open it.

        Raises:
            UsageError: the name can't be one.
        """
        wanted = rows.checked_name(name or tree.name)
        with self._database.writing():
            session = rows.add_tree(self._connection, tree, wanted)
        return self._opened(session)

    def tree(self, which: str = "") -> Tree:
        """Everything that is in a chat.

        Raises:
            UsageError: there is no such chat.
        """
        found = self.find(which)
        with self._database.explained():
            return rows.tree(self._connection, found.id)

    def rename(self, which: str, name: str) -> None:
        """Call a chat something else.

        Raises:
            UsageError: there is no such chat, or the name can't be one or is taken.
        """
        found = self.find(which)
        name = rows.checked_name(name)
        if name.lower() != found.name.lower():
            self._refuse_taken(name)
        with self._database.writing():
            self._connection.execute("UPDATE sessions SET name = ? WHERE id = ?", (name, found.id))

    def delete(self, which: str) -> None:
        """Delete a chat with all its branches; its text does not stay in the file.

        Raises:
            UsageError: there is no such chat, or another process has it open.
        """
        found = self.find(which)
        if not self._locks.is_free(found.id):
            raise UsageError(f"{found.name} is open in another llmrun", hint="leave that chat first")
        with self._database.writing():
            search.forget(self._connection, found.id)
            self._connection.execute("DELETE FROM sessions WHERE id = ?", (found.id,))
        with self._database.explained():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # the log still has the text

    def search(self, text: str, limit: int = 20) -> list[Hit]:
        """Messages that hold every word of a text, best first."""
        with self._database.writing():
            return search.search(self._connection, text, limit)

    def close(self) -> None:
        """Close the file and say that no chat is open any more."""
        self._database.close()
        self._locks.close()

    def __enter__(self) -> Sessions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self, session: int) -> SavedChat:
        return SavedChat(self._database, self._locks, self._clock, session=session)

    def _named(self, which: str) -> list[SessionFacts]:
        if which.isdecimal():
            return self._facts("WHERE s.id = ?", int(which))
        return self._facts("WHERE s.name = ?", which)

    def _facts(self, which: str, *values: int | str) -> list[SessionFacts]:
        query = (
            "SELECT s.id, s.name, s.created, s.updated, coalesce(h.turn, 0), "
            "(SELECT count(*) FROM branches b WHERE b.session = s.id), "
            "coalesce((SELECT m.name FROM models m JOIN answers a ON a.model = m.id "
            "WHERE a.message = CASE h.role WHEN 'user' THEN h.parent ELSE h.id END), ''), "
            "coalesce((SELECT substr(CASE typed WHEN '' THEN content ELSE typed END, 1, 200) FROM messages f "
            "WHERE f.session = s.id AND f.parent IS NULL ORDER BY f.id DESC LIMIT 1), '') "
            "FROM sessions s LEFT JOIN branches c ON c.session = s.id AND c.name = s.branch "
            "LEFT JOIN messages h ON h.id = c.head "
        )
        with self._database.explained():
            return [SessionFacts(*row) for row in self._connection.execute(query + which, values)]

    def _refuse_taken(self, name: str) -> None:
        if self._named(name):
            raise UsageError(f"there is already a saved chat called {name}", hint="llmrun sessions list")

    def _no_such(self, which: str) -> UsageError:
        if not which:
            return UsageError("there is no saved chat yet", hint="llmrun chat begins one")
        hint = did_you_mean(which, [facts.name for facts in self.all()], "llmrun sessions list shows all")
        return UsageError(f"there is no saved chat called {which}", hint=hint)


def folder_in(state_dir: Path) -> Path:
    """Where below config.Settings.state_dir the saved chats are."""
    return state_dir / "sessions"


def _own(folder: Path) -> Locks:
    """See that only its owner looks into the folder; gives the locks of its chats."""
    if os.name != "nt" and folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
    return Locks(folder / "sessions.lock")

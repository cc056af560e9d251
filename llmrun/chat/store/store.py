"""The saved chats of one user: find, open, list, rename, delete, search and copy them.

Owns the shelf; must not know how a chat goes on (sessions.chat) or what a row looks like (sessions.rows).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from llmrun.chat.store import reading, rows, search
from llmrun.chat.store.chat import SavedChat
from llmrun.chat.store.locks import Locks, NoLocks
from llmrun.chat.store.rescue import copy_readable
from llmrun.chat.store.schema import FILE, SCHEMA
from llmrun.chat.store.search import Hit
from llmrun.chat.store.turns import Answer, Question, Tree
from llmrun.errors import LlmrunError, ResourceError, UsageError, did_you_mean
from llmrun.storage import Database, is_damage

_REPAIR = "llmrun sessions repair"
_NAMES = "SELECT name FROM sessions NOT INDEXED ORDER BY updated DESC, id DESC"


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

    @classmethod
    def of(cls, session: int, tree: Tree) -> SessionFacts:
        """The facts of a chat that was read whole."""
        path = [entry.part for entry in tree.path()]
        turns = sum(isinstance(part, Question) for part in path)
        model = next((part.model.name for part in reversed(path[-2:]) if isinstance(part, Answer)), "")
        firsts = [entry.part for entry in tree.entries if entry.parent is None]
        first = firsts[-1].shown[:200] if firsts and isinstance(firsts[-1], Question) else ""
        return cls(session, tree.name, tree.created, tree.updated, turns, len(tree.branches), model, first)


class Sessions:
    """An open store; use it as a context manager or call close().

    Args:
        folder: where the file is kept, see folder_in(). Made where needed, for its owner alone. None keeps the
            chats in memory, and nothing on a disk.
        clock: seconds since 1970.
        on_damage: told of each damaged chat that is left out, once, in a line.

    Attributes:
        folder: where the file is kept; None for memory.
        note: a line to be shown once, such as that a damaged file was moved aside; "" for nothing.

    Raises:
        UsageError: the file is of a newer llmrun.
        ResourceError: it can't be read or written.
    """

    def __init__(
        self,
        folder: Path | None,
        clock: Callable[[], float] = time.time,
        on_damage: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.folder = folder
        self._database = Database(folder / FILE if folder else None, SCHEMA, copy_readable)
        self._connection, self.note = self._database.connection, self._database.note
        with self._database.explained():
            reading.prepare(self._connection)
            self._locks = _own(folder) if folder else NoLocks()
        self._clock, self._on_damage = clock, on_damage
        self._told: set[int] = set()

    def all(self) -> list[SessionFacts]:
        """Every chat that is not damaged, the one used last first."""
        try:
            with self._database.explained():
                damaged = reading.unsound_chats(self._connection)
                found = self._facts(damaged)
        except ResourceError as error:
            if not is_damage(error.__cause__):
                raise
            found, damaged = [], set()
            for session, tree in self._sound_trees():
                found.append(SessionFacts.of(session, tree))
            found.sort(key=lambda facts: (facts.updated, facts.id), reverse=True)
        for session in sorted(damaged):
            self._tell(session)
        return found

    def names(self) -> list[str]:
        """The names of all chats, for the Tab key."""
        with self._database.explained():
            return [row[0] for row in self._connection.execute(_NAMES) if type(row[0]) is str]

    def has(self, which: str) -> bool:
        """Whether there is a chat of that name or id, be it damaged or not."""
        return bool(self._ids(which))

    def find(self, which: str = "") -> SessionFacts:
        """A chat by its name or id, be it damaged or not; the one used last of those that are not for "".

        Raises:
            UsageError: there is none.
        """
        if which:
            session = self._id_of(which)
            return SessionFacts.of(session, self._read(session).tree)
        found = self.all()
        if not found:
            raise self._no_such("")
        return found[0]

    def readable(self, which: str = "") -> reading.ChatReading:
        """A chat as far as it can be read.

        Raises:
            UsageError: there is no such chat.
            ResourceError: nothing of it can be read.
        """
        return self._read(self._id_of(which) if which else self._newest())

    def repair(self) -> str:
        """Save what can be read in a new file, if anything is damaged; the damaged file is kept.

        Returns:
            What was done, in a line; "" where nothing is damaged.

        Raises:
            UsageError: another process has a chat open.
        """
        sessions = self._ids()
        if not reading.file_damage(self._connection) and not any(map(self._damage, sessions)):
            return self.note
        if not all(map(self._locks.is_free, sessions)):
            raise UsageError("a saved chat is open in another llmrun", hint="leave that chat first")
        self._database.replace()
        self._connection, self.note = self._database.connection, self._database.note
        reading.prepare(self._connection)
        return self.note

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
        return self._opened(self._id_of(which) if which else self._newest())

    def copy(self, which: str, name: str = "") -> SavedChat:
        """A new chat with everything that is in another one, opened. Its name is the other's with a number by default.

        Raises:
            UsageError: there is no such chat, or the name can't be one.
        """
        return self.add(self.tree(which), name)

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
            ResourceError: it is damaged.
        """
        session = self._id_of(which) if which else self._newest()
        found = self._read(session)
        if found.damage:
            raise reading.damaged(session, found)
        return found.tree

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
        try:
            with self._database.writing():
                damaged = reading.unsound_chats(self._connection)
                found = search.search(self._connection, text, limit, damaged)
        except ResourceError as error:
            if not is_damage(error.__cause__):
                raise
            return search.search_trees((tree for _, tree in self._sound_trees()), text, limit)
        for session in sorted(damaged):
            self._tell(session)
        return found

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

    def _id_of(self, which: str) -> int:
        # In a damaged file a chat may be out of reach but by its id, as all() reads it.
        found = self._ids(which) or [facts.id for facts in self.all() if facts.name.lower() == which.lower()]
        if not found:
            raise self._no_such(which)
        return found[0]

    def _ids(self, which: str = "") -> list[int]:
        with self._database.explained():
            return reading.chat_ids(self._connection, which)

    def _newest(self) -> int:
        """The id of the chat used last of those that are not damaged."""
        for facts in self.all():
            if self._damage(facts.id) is None:
                return facts.id
            self._tell(facts.id)
        raise self._no_such("")

    def _read(self, session: int) -> reading.ChatReading:
        with self._database.explained():
            return reading.read_chat(self._connection, session)

    def _damage(self, session: int) -> LlmrunError | None:
        """What is wrong with a chat; None for nothing."""
        try:
            found = self._read(session)
        except (ResourceError, UsageError) as error:
            return ResourceError(f"the saved chat with the id {session} can't be read", why=error.why, hint=error.hint)
        return reading.damaged(session, found) if found.damage else None

    def _sound_trees(self) -> Iterator[tuple[int, Tree]]:
        """Every chat of a damaged file that can be read whole, newest first; the others are told."""
        for session in reversed(self._ids()):
            if self._damage(session):
                self._tell(session)
            else:
                yield session, self._read(session).tree

    def _tell(self, session: int) -> None:
        """Say once that a chat is left out."""
        if session not in self._told:
            self._told.add(session)
            error = self._damage(session)
            self._on_damage(f"Left out: {error or f'the saved chat {session} is damaged'}. Try: {_REPAIR}")

    def _facts(self, but: set[int]) -> list[SessionFacts]:
        others = f"WHERE s.id NOT IN ({', '.join(map(str, but))}) ORDER BY s.updated DESC, s.id DESC"
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
        return [SessionFacts(*row) for row in self._connection.execute(query + others)]

    def _refuse_taken(self, name: str) -> None:
        if self.has(name):
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

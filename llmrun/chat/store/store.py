"""The saved chats of one user: find, open, list, rename, delete, search and copy them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmrun.chat.store import rows
from llmrun.chat.store.chat import Locks, SavedChat
from llmrun.chat.store.rows import FILE, SCHEMA
from llmrun.chat.store.search import Hit, search
from llmrun.chat.store.turns import Answer, Question, Tree
from llmrun.errors import LlmrunError, ResourceError, UsageError, did_you_mean
from llmrun.storage import Database

MEDIA = "images"
"""Folder of the images that came over HTTP, beside the file: each in a folder named after its hash."""
# Ids only grow, while clocks are set back.
_LAST_USED_FIRST = (
    "SELECT name FROM sessions s NOT INDEXED "
    "ORDER BY coalesce((SELECT max(id) FROM messages WHERE session = s.id), 0) DESC, s.id DESC"
)


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A saved chat, as it is listed."""

    id: int  # never used again for another chat
    name: str  # unique, ignoring case
    created: float  # seconds since 1970
    updated: float  # the same
    turns: int  # of the current branch
    branches: int
    model: str  # name of the model of the last answer; "" before the first turn
    firsts: tuple[str, ...]  # beginnings of the first question; several if it was edited

    @classmethod
    def of(cls, session: int, tree: Tree) -> SessionFacts:
        """Return the facts of a chat that was read whole."""
        path = [entry.part for entry in tree.path()]
        turns = sum(isinstance(part, Question) for part in path)
        model = next((part.model.name for part in reversed(path[-2:]) if isinstance(part, Answer)), "")
        firsts = tuple(first[:200] for first in tree.first_questions)
        return cls(session, tree.name, tree.created, tree.updated, turns, len(tree.branches), model, firsts)

    @property
    def first(self) -> str:
        """Beginning of the first question; the newest one, if it was edited."""
        return self.firsts[-1] if self.firsts else ""


class Sessions:
    """An open store; use it as a context manager or call close().

    Args:
        folder: parent of the file, see folder_in(); made if needed, for its owner alone. None keeps the chats in
            memory.
        clock: seconds since 1970.
        on_damage: called once with a line for each damaged chat that is left out.

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
        self._database = Database(folder / FILE if folder else None, SCHEMA, rows.copy_sound)
        self._connection, self.note = self._database.connection, self._database.note
        with self._database.explained():
            rows.read_any_text(self._connection)
            self._locks = _own(folder) if folder else Locks(None)
        self._clock, self._on_damage = clock, on_damage
        self._reported: set[int] = set()

    def all(self) -> list[SessionFacts]:
        """Return every sound chat, the last used one first."""
        trees = sorted(self._sound_trees(), key=lambda pair: (pair[1].last_id, pair[0]), reverse=True)
        return [SessionFacts.of(session, tree) for session, tree in trees]

    def names(self) -> list[str]:
        """Return the names of all chats, for completion."""
        with self._database.explained():
            return [row[0] for row in self._connection.execute(_LAST_USED_FIRST) if type(row[0]) is str]

    def has(self, which: str) -> bool:
        """Return whether there is a chat of that name or id, damaged or not."""
        return bool(self._ids(which))

    def find(self, which: str = "") -> SessionFacts:
        """Return a chat by its name or id, damaged or not; for "" the last used sound one.

        Raises:
            UsageError: there is none.
        """
        if which:
            session = self._id_of(which)
            try:
                return SessionFacts.of(session, self._read(session))
            except ResourceError as error:
                return SessionFacts(session, f"chat-{session}", 0.0, 0.0, 0, 0, "", (str(error),))
        facts = self.all()
        if not facts:
            raise self._no_such("")
        return facts[0]

    def last_free(self) -> tuple[SessionFacts, list[str]]:
        """Return the last used sound chat that no other process has open, and the names of later ones, which are open.

        If all are open, it is the last used one, and there are no names.

        Raises:
            UsageError: there is no chat.
        """
        passed: list[SessionFacts] = []
        for facts in self._newest_first():
            if self._locks.is_free(facts.id):
                return facts, [each.name for each in passed]
            passed.append(facts)
        return passed[0], []

    def new(self, name: str = "", *, system: str = "", documents: str = "") -> SavedChat:
        """Return a new chat, which is saved from its first turn on.

        Args:
            name: made of the first question by default.
            system: prompt.
            documents: folder, see SavedChat.set_documents().

        Raises:
            UsageError: the name is invalid or taken.
        """
        if name:
            name = rows.checked_name(name)
            self._refuse_taken(name)
        return SavedChat(self._database, self._locks, self._clock, name=name, system=system, documents=documents)

    def open(self, which: str = "") -> SavedChat:
        """Open a chat to continue it. If its `open_elsewhere` is set, another process has it; copy() still works.

        Args:
            which: its name or id; "" for that of last_free().

        Raises:
            UsageError: there is no such chat.
        """
        return self._opened(self._id_of(which) if which else self.last_free()[0].id)

    def copy(self, which: str, name: str = "") -> SavedChat:
        """Copy a chat, and open the copy. Its name is by default the original's with a number.

        Raises:
            UsageError: there is no such chat, or the name is invalid.
        """
        return self.add(self.tree(which), name)

    def add(self, tree: Tree, name: str = "") -> SavedChat:
        """Save a whole chat under new ids, and open it.

        Raises:
            UsageError: the name is invalid.
        """
        checked = rows.checked_name(name or tree.name)
        with self._database.writing():
            session = rows.add_tree(self._connection, tree, checked)
        return self._opened(session)

    def tree(self, which: str = "") -> Tree:
        """Return a whole chat.

        Raises:
            UsageError: there is no such chat.
            ResourceError: it is damaged.
        """
        return self._read(self._id_of(which) if which else next(self._newest_first()).id)

    def head(self, session: int) -> int | None:
        """Return the id of the last entry of a chat's current branch; None for none."""
        query = "SELECT b.head FROM sessions s JOIN branches b ON b.session = s.id AND b.name = s.branch WHERE s.id = ?"
        with self._database.explained():
            row = self._connection.execute(query, (session,)).fetchone()
        return row[0] if row else None

    def rename(self, which: str, name: str) -> None:
        """Rename a chat.

        Raises:
            UsageError: there is no such chat, or the name is invalid or taken.
        """
        facts = self.find(which)
        name = rows.checked_name(name)
        if name.lower() != facts.name.lower():
            self._refuse_taken(name)
        with self._database.writing():
            self._connection.execute("UPDATE sessions SET name = ? WHERE id = ?", (name, facts.id))

    def delete(self, which: str) -> None:
        """Delete a chat with all its branches; its text does not stay in the file, nor its images and audio in MEDIA.

        Raises:
            UsageError: there is no such chat, or another process has it open.
        """
        facts = self.find(which)
        if not self._locks.is_free(facts.id):
            raise UsageError(f"{facts.name} is open in another llmrun", hint="leave that chat first")
        with self._database.writing():
            self._connection.execute("DELETE FROM sessions WHERE id = ?", (facts.id,))
        with self._database.explained():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # the log still has the text
            rows_with_media = self._connection.execute("SELECT pictures FROM messages WHERE pictures != ''")
            named = "".join(row[0] for row in rows_with_media)
        for file in (self.folder / MEDIA).glob("*") if self.folder else ():
            if file.name not in named:
                shutil.rmtree(file, ignore_errors=True)

    def search(self, text: str, limit: int = 20) -> list[Hit]:
        """Return the messages that contain every word of a text, best first."""
        return search((tree for _, tree in self._sound_trees()), text, limit)

    def close(self) -> None:
        self._database.close()
        self._locks.close()

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _opened(self, session: int) -> SavedChat:
        return SavedChat(self._database, self._locks, self._clock, session=session)

    def _id_of(self, which: str) -> int:
        # A damaged file may give access to a chat only by its id, as all() reads it.
        ids = self._ids(which) or [facts.id for facts in self.all() if facts.name.lower() == which.lower()]
        if not ids:
            raise self._no_such(which)
        return ids[0]

    def _ids(self, which: str = "") -> list[int]:
        with self._database.explained():
            return rows.chat_ids(self._connection, which)

    def _newest_first(self) -> Iterator[SessionFacts]:
        """Yield the chats of which all can be read, not only the texts; report the others.

        Raises:
            UsageError: there is none.
        """
        n_sound = 0
        for facts in self.all():
            try:
                self._read(facts.id)
            except (ResourceError, UsageError) as error:
                self._report(facts.id, error)
            else:
                n_sound += 1
                yield facts
        if not n_sound:
            raise self._no_such("")

    def _read(self, session: int, *, only_texts: bool = False) -> Tree:
        with self._database.explained():
            return rows.read_chat(self._connection, session, only_texts=only_texts)

    def _sound_trees(self) -> Iterator[tuple[int, Tree]]:
        """Yield the texts of the sound chats; report the others."""
        for session in self._ids():
            try:
                tree = self._read(session, only_texts=True)
            except (ResourceError, UsageError) as error:
                self._report(session, error)
            else:
                yield session, tree

    def _report(self, session: int, error: LlmrunError) -> None:
        """Report once that a chat is left out."""
        if session not in self._reported:
            self._reported.add(session)
            self._on_damage(f"Left out: {error}; {error.hint}")

    def _refuse_taken(self, name: str) -> None:
        if self.has(name):
            raise UsageError(f"there is already a saved chat called {name}", hint="choose another name")

    def _no_such(self, which: str) -> UsageError:
        if not which:
            return UsageError("there is no saved chat yet", hint="llmrun chat starts one")
        hint = did_you_mean(
            which, [facts.name for facts in self.all()], "llmrun sessions list, or /sessions in a chat, shows all"
        )
        return UsageError(f"there is no saved chat {which!r}", hint=hint)


def folder_in(state_dir: Path) -> Path:
    """Return the folder of the saved chats below config.Settings.state_dir."""
    return state_dir / "sessions"


def _own(folder: Path) -> Locks:
    """Make the folder private to its owner; return the locks of its chats."""
    if os.name != "nt" and folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
    return Locks(folder / "sessions.lock")

"""One open saved chat: add turns, branch, go back, and read the current conversation.

Each step is one transaction, on the disk when it returns. Nothing is deleted: turns undone, retried or edited stay as
alternatives that switch() finds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmrun.chat.store import rows
from llmrun.chat.store.rows import SCHEMA
from llmrun.chat.store.turns import Answer, Question, Tree, TurnEntry, WindowTurn, in_window
from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.messages import Message
from llmrun.storage import Database
from llmrun.system import lock_byte, unlock_byte


class Locks:
    """The locks of this process. One object for one file: closing a second would drop the locks of the first.

    Args:
        path: of the file; None for chats in memory, which no other process can see.

    Raises:
        OSError: the file can't be made.
    """

    def __init__(self, path: Path | None) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600) if path else None
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
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _lock(self, byte: int) -> bool:
        return self._descriptor is None or lock_byte(self._descriptor, byte) is not False

    def _unlock(self, byte: int) -> None:
        if self._descriptor is not None:
            unlock_byte(self._descriptor, byte)


@dataclass(frozen=True, slots=True)
class Branch:
    """One continuation of a chat."""

    name: str  # "" for an end that undo, retry or edit left, which has no name yet
    head: int | None  # id of its last entry; None before the first turn
    turns: int
    current: bool
    last: str  # beginning of its last question


class SavedChat:
    """A conversation that is saved turn by turn. Sessions makes it; call release() at the end."""

    def __init__(
        self,
        database: Database,
        locks: Locks,
        clock: Callable[[], float],
        *,
        session: int | None = None,
        name: str = "",
        system: str = "",
        documents: str = "",
    ) -> None:
        self._database, self._connection = database, database.connection
        self._locks, self._clock = locks, clock
        self.id = session
        self.name, self.system, self.branch, self.documents = name, system, rows.MAIN, documents
        self.open_elsewhere = self.is_detached = False
        self._entries: list[TurnEntry] = []
        if session is not None:
            # Locked before it is read: another process can't change it after that.
            self.open_elsewhere = not locks.claim(session)
            try:
                self.reload()
            except LlmrunError:
                self.release()
                raise

    @property
    def entries(self) -> tuple[TurnEntry, ...]:
        """The conversation of the current branch."""
        return tuple(self._entries)

    @property
    def last_question(self) -> TurnEntry | None:
        return next((entry for entry in reversed(self._entries) if isinstance(entry.part, Question)), None)

    @property
    def last_answer(self) -> Answer | None:
        return next((entry.part for entry in reversed(self._entries) if isinstance(entry.part, Answer)), None)

    @property
    def is_answered(self) -> bool:
        """Whether the last question has an answer, or there is no question yet."""
        return not self._entries or isinstance(self._entries[-1].part, Answer)

    def window(self) -> list[WindowTurn]:
        """Return the answered turns that the model still sees, without the system prompt."""
        return in_window(self._entries if self.is_answered else self._entries[:-1])

    def window_before_question(self) -> list[WindowTurn]:
        """Return the turns before the last question that the model still sees."""
        return in_window(self._entries[: self._place(self.last_question)])

    def messages(self) -> list[Message]:
        """Return the messages that precede the next question in a request."""
        system = [Message("system", self.system)] if self.system else []
        return [*system, *(message for turn in self.window() for message in turn.messages)]

    def add_question(self, question: Question, *, beside: TurnEntry | None = None) -> None:
        """Save a question before it is answered, so that it can't be lost. The first one names the chat.

        Args:
            beside: a question of `entries` to replace. By default the question follows the last turn, or replaces a
                question without an answer. The replaced one stays as an alternative.

        Raises:
            DiskFullError: the disk is full; nothing has changed.
            UsageError: another process has the chat open.
            LlmrunError: it can't be written; nothing has changed.
        """
        if beside is None and not self.is_answered:
            beside = self.last_question
        self._save(self._place(beside) if beside else len(self._entries), question)

    def add_answer(self, answer: Answer) -> None:
        """Save another answer to the last question. Raises as add_question()."""
        self._save(self._place(self.last_question) + 1, answer)

    def take_answer(self, entry: TurnEntry) -> None:
        """Continue with one of the answers to the last question; the others stay as alternatives."""
        self._move(entry.id, [*self._entries[: self._place(self.last_question) + 1], entry])

    def undo(self) -> Question | None:
        """Go back to before the last turn; return its question, None if there is no turn."""
        last = self.last_question
        if last is None:
            return None
        self._move(last.parent, self._entries[: self._place(last)])
        assert isinstance(last.part, Question)
        return last.part

    def clear(self) -> None:
        self._move(None, [])

    def set_system(self, system: str) -> None:
        if self.id is not None:
            with self._writing():
                self._connection.execute("UPDATE sessions SET system = ? WHERE id = ?", (system, self.id))
        self.system = system

    def set_documents(self, folder: str) -> None:
        """Let passages of a folder's documents go along with questions of the page; "" for none."""
        if self.id is not None:
            with self._writing():
                self._connection.execute("UPDATE sessions SET documents = ? WHERE id = ?", (folder, self.id))
        self.documents = folder

    def rename(self, name: str) -> None:
        """Rename the chat.

        Raises:
            UsageError: the name is invalid or taken.
        """
        name = rows.checked_name(name)
        with self._writing():
            query = "SELECT 1 FROM sessions WHERE name = ? AND id IS NOT ?"
            if self._connection.execute(query, (name, self.id)).fetchone():
                raise UsageError(f"there is already a saved chat called {name}", hint="choose another name")
            self._connection.execute("UPDATE sessions SET name = ? WHERE id = ?", (name, self.id))
        self.name = name

    def make_branch(self, name: str) -> None:
        """Continue on a new branch from here; the current one stays where it is.

        Raises:
            UsageError: the name is invalid or taken, or there is no turn yet.
        """
        name = rows.checked_name(name)
        if self.id is None:
            raise UsageError("there is nothing to branch off yet", hint="ask something first")
        if any(branch.name == name for branch in self.branches()):
            raise UsageError(f"there is already a branch called {name}", hint=f"/branch {name} goes there")
        self._go_to(name, self._entries[-1].id if self._entries else None)

    def switch(self, which: str) -> None:
        """Continue with another branch, or with an end without a name ("#" and its id), which gets one.

        Raises:
            UsageError: there is no such branch.
        """
        for branch in self.branches():
            if branch.name and branch.name == which:
                self._go_to(branch.name, branch.head)
                return
            if not branch.name and which == f"#{branch.head}":
                self._go_to(self._next_name(), branch.head)
                return
        names = ", ".join(branch.name or f"#{branch.head}" for branch in self.branches())
        raise UsageError(f"there is no branch {which!r}", why=f"there are {names}" if names else "there are none")

    def branches(self) -> list[Branch]:
        """Return the continuations of the chat: branches by name, then ends without a name, oldest first."""
        if self.id is None:
            return []
        last = (
            "coalesce((SELECT substr(CASE q.typed WHEN '' THEN q.content ELSE q.typed END, 1, 200) FROM messages q "
            "WHERE q.id = CASE m.role WHEN 'user' THEN m.id ELSE m.parent END), '')"
        )
        with self._database.explained():
            named = self._connection.execute(
                f"SELECT b.name, b.head, coalesce(m.turn, 0), {last} FROM branches b "  # noqa: S608 - no input
                "LEFT JOIN messages m ON m.id = b.head WHERE b.session = ? ORDER BY b.name",
                (self.id,),
            ).fetchall()
            loose = self._connection.execute(
                f"SELECT '', m.id, m.turn, {last} FROM messages m WHERE m.session = ? "  # noqa: S608 - no input
                "AND NOT EXISTS (SELECT 1 FROM messages c WHERE c.parent = m.id) "
                "AND NOT EXISTS (SELECT 1 FROM branches b WHERE b.head = m.id) ORDER BY m.id",
                (self.id,),
            ).fetchall()
        return [Branch(name, head, turns, name == self.branch, text) for name, head, turns, text in (*named, *loose)]

    def difference(self, branch: Branch) -> tuple[int, str] | None:
        """Return the number of the first turn in which a branch differs from this conversation, and its text there.

        None if this conversation contains all of the branch.
        """
        with self._database.explained():
            others = rows.read_path(self._connection, branch.head)
        here = {entry.id for entry in self._entries}
        turn = 0
        for entry in others:
            turn += isinstance(entry.part, Question)
            if entry.id not in here:
                return turn, entry.part.shown if isinstance(entry.part, Question) else entry.part.content
        return None

    def tree(self) -> Tree:
        """Return the whole chat.

        Raises:
            UsageError: there is no turn yet.
        """
        if self.id is None:
            raise UsageError("this chat has no turns yet", hint="ask something first")
        return self._whole(self.id)

    def in_memory(self) -> SavedChat:
        """Return a copy of the conversation that is not saved on a disk."""
        copy = SavedChat(Database(None, SCHEMA), Locks(None), self._clock, name=self.name, system=self.system)
        copy.is_detached = True
        for entry in self._entries:
            copy._save(len(copy._entries), entry.part)
        return copy

    def reload(self) -> None:
        """Read the chat again: another process may have changed it."""
        assert self.id is not None
        tree = self._whole(self.id)
        self.name, self.system, self.branch, self._entries = tree.name, tree.system, tree.branch, list(tree.path())
        self.documents = tree.documents

    def _whole(self, session: int) -> Tree:
        with self._database.explained():
            return rows.read_chat(self._connection, session)

    def release(self) -> None:
        """Unlock the chat."""
        if self.is_detached:
            self._database.close()
        elif self.id is not None and not self.open_elsewhere:
            self._locks.release(self.id)

    def _place(self, question: TurnEntry | None) -> int:
        if question is None or question not in self._entries:
            raise UsageError("there is no question yet", hint="ask something first")
        return self._entries.index(question)

    def _save(self, place: int, part: Question | Answer) -> None:
        """Save a question or an answer after the first `place` entries, as the new end of the branch."""
        before = self._entries[:place]
        parent = before[-1].id if before else None
        now = self._clock()
        with self._writing():
            session, name = self._session(part.shown if isinstance(part, Question) else "", now)
            added = rows.add_entry(self._connection, session, parent, part, now)
            rows.set_head(self._connection, session, self.branch, added.id)
            self._connection.execute("UPDATE sessions SET updated = ? WHERE id = ?", (now, session))
        if self.id is None:
            self._locks.claim(session)
        self.id, self.name, self._entries = session, name, [*before, added]

    def _session(self, first: str, now: float) -> tuple[int, str]:
        """Return the chat's id and name; insert its row with the first question."""
        if self.id is not None:
            return self.id, self.name
        # Another chat may have taken the name meanwhile.
        name = rows.free_name(self._connection, self.name or rows.name_from(first))
        return rows.add_session(self._connection, name, self.system, self.branch, now, self.documents), name

    def _move(self, head: int | None, entries: list[TurnEntry]) -> None:
        if self.id is not None:
            with self._writing():
                rows.set_head(self._connection, self.id, self.branch, head)
        self._entries = entries

    def _go_to(self, branch: str, head: int | None) -> None:
        assert self.id is not None
        with self._writing():
            rows.set_head(self._connection, self.id, branch, head)
            self._connection.execute("UPDATE sessions SET branch = ? WHERE id = ?", (branch, self.id))
        self.reload()

    def _next_name(self) -> str:
        names = {branch.name for branch in self.branches()}
        number = 2
        while f"{rows.MAIN}-{number}" in names:
            number += 1
        return f"{rows.MAIN}-{number}"

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self.open_elsewhere:
            raise UsageError(f"{self.name} is open in another llmrun", hint="leave that chat first, or open a copy")
        with self._database.writing():
            yield

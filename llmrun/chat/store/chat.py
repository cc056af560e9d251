"""One open saved chat: how it grows, forks, goes back, and what of it is the conversation now.

Owns the order of those steps: each is one transaction, on the disk when it returns. Nothing is ever deleted
here: what was undone, retried or edited stays as an alternative that switch() finds again. Must not know terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llmrun.chat.store import reading, rows
from llmrun.chat.store.locks import Locks, NoLocks
from llmrun.chat.store.schema import SCHEMA
from llmrun.chat.store.turns import Answer, Question, Tree, TurnEntry, WindowTurn, in_window
from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.messages import Message
from llmrun.storage import Database


@dataclass(frozen=True, slots=True)
class Branch:
    """One way in which a chat goes on.

    Attributes:
        name: "" for an end that was left by undo, retry or edit and has no name yet.
        head: id of the entry it ends with; None before the first turn.
        turns: how many it has.
        current: whether it is the one that goes on.
        last: what its last question begins with.
    """

    name: str
    head: int | None
    turns: int
    current: bool
    last: str


class SavedChat:
    """A conversation that is saved turn by turn. Made by sessions.store.Sessions; release() it when it is left.

    Attributes:
        id: None until its first question is saved.
        name: "" until then, unless one was wished for.
        system: prompt; "" for none.
        branch: the current one's name.
        open_elsewhere: another process has this chat open; what would change it is refused.
        is_detached: the disk refused it; it goes on in memory, and is lost when it is left.
    """

    def __init__(
        self,
        database: Database,
        locks: Locks,
        clock: Callable[[], float],
        *,
        session: int | None = None,
        name: str = "",
        system: str = "",
    ) -> None:
        self._database, self._connection = database, database.connection
        self._locks, self._clock = locks, clock
        self.id = session
        self.name, self.system, self.branch = name, system, rows.MAIN
        self.open_elsewhere = self.is_detached = False
        self._entries: list[TurnEntry] = []
        if session is not None:
            # Before it is read: whoever had it has written all then.
            self.open_elsewhere = not locks.claim(session)
            try:
                self.reload()
            except LlmrunError:
                self.release()
                raise

    @property
    def entries(self) -> tuple[TurnEntry, ...]:
        """The conversation of the current branch, from its first question on."""
        return tuple(self._entries)

    @property
    def last_question(self) -> TurnEntry | None:
        """The question of the last turn."""
        return next((entry for entry in reversed(self._entries) if isinstance(entry.part, Question)), None)

    @property
    def last_answer(self) -> Answer | None:
        """The newest answer of the conversation."""
        return next((entry.part for entry in reversed(self._entries) if isinstance(entry.part, Answer)), None)

    @property
    def is_answered(self) -> bool:
        """Whether the last question has an answer; so it is before the first one."""
        return not self._entries or isinstance(self._entries[-1].part, Answer)

    def window(self) -> list[WindowTurn]:
        """The answered turns that the model still sees, without the system prompt."""
        return in_window(self._entries if self.is_answered else self._entries[:-1])

    def window_before_question(self) -> list[WindowTurn]:
        """The same of what stands before the last question."""
        return in_window(self._entries[: self._place(self.last_question)])

    def messages(self) -> list[Message]:
        """What is sent to the model, before the next question."""
        system = [Message("system", self.system)] if self.system else []
        return [*system, *(message for turn in self.window() for message in turn.messages)]

    def add_question(self, question: Question, *, beside: TurnEntry | None = None) -> None:
        """Save a question, so that nothing that happens to its answer can lose it. The first one names the chat.

        Args:
            beside: a question of `entries` that it takes the place of. By default it follows the last turn, or takes
                the place of a question without an answer. What it replaces stays as an alternative.

        Raises:
            DiskFullError: the disk is full; nothing has changed.
            UsageError: another process has the chat open.
            LlmrunError: it can't be written; nothing has changed.
        """
        if beside is None and not self.is_answered:
            beside = self.last_question
        self._save(self._place(beside) if beside else len(self._entries), question)

    def add_answer(self, answer: Answer) -> None:
        """Save an answer to the last question, beside those that it has. Raises as add_question()."""
        self._save(self._place(self.last_question) + 1, answer)

    def take_answer(self, entry: TurnEntry) -> None:
        """Go on with one of the answers to the last question; the others stay as alternatives."""
        self._move(entry.id, [*self._entries[: self._place(self.last_question) + 1], entry])

    def undo(self) -> Question | None:
        """Go back to before the last turn; gives its question, None if there is no turn."""
        last = self.last_question
        if last is None:
            return None
        self._move(last.parent, self._entries[: self._place(last)])
        assert isinstance(last.part, Question)
        return last.part

    def clear(self) -> None:
        """Go back to before the first turn."""
        self._move(None, [])

    def set_system(self, system: str) -> None:
        """Another system prompt from now on."""
        if self.id is not None:
            with self._writing():
                self._connection.execute("UPDATE sessions SET system = ? WHERE id = ?", (system, self.id))
        self.system = system

    def rename(self, name: str) -> None:
        """Call the chat something else.

        Raises:
            UsageError: the name can't be one, or is taken.
        """
        name = rows.checked_name(name)
        with self._writing():
            query = "SELECT 1 FROM sessions WHERE name = ? AND id IS NOT ?"
            if self._connection.execute(query, (name, self.id)).fetchone():
                raise UsageError(f"there is already a saved chat called {name}", hint="llmrun sessions list")
            self._connection.execute("UPDATE sessions SET name = ? WHERE id = ?", (name, self.id))
        self.name = name

    def make_branch(self, name: str) -> None:
        """Go on under a new branch from here; the one there was stays where it is.

        Raises:
            UsageError: the name can't be one or is taken, or nothing was said yet.
        """
        name = rows.checked_name(name)
        if self.id is None:
            raise UsageError("there is nothing to branch off yet", hint="ask something first")
        if any(branch.name == name for branch in self.branches()):
            raise UsageError(f"there is already a branch called {name}", hint=f"/branch {name} goes there")
        self._go_to(name, self._entries[-1].id if self._entries else None)

    def switch(self, which: str) -> None:
        """Go on with another branch, or with an end that has no name yet ("#" and its id), which gets one.

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
        raise UsageError(f"there is no branch called {which}", why=f"there are {names}" if names else "there are none")

    def branches(self) -> list[Branch]:
        """Every way in which the chat goes on: branches by name, then ends without a name, oldest first."""
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
        """The number of the turn in which a branch leaves this conversation, and what was said there instead.

        None where all of it is in this conversation.
        """
        with self._database.explained():
            others = reading.read_path(self._connection, branch.head)
        here = {entry.id for entry in self._entries}
        turn = 0
        for entry in others:
            turn += isinstance(entry.part, Question)
            if entry.id not in here:
                return turn, entry.part.shown if isinstance(entry.part, Question) else entry.part.content
        return None

    def tree(self) -> Tree:
        """Everything that was said in the chat.

        Raises:
            UsageError: nothing was said yet.
        """
        if self.id is None:
            raise UsageError("nothing was said in this chat yet", hint="ask something first")
        return self._whole(self.id)

    def in_memory(self) -> SavedChat:
        """A copy of the conversation that needs no disk."""
        copy = SavedChat(Database(None, SCHEMA), NoLocks(), self._clock, name=self.name, system=self.system)
        copy.is_detached = True
        for entry in self._entries:
            copy._save(len(copy._entries), entry.part)
        return copy

    def reload(self) -> None:
        """Read the chat again, as another process may have changed it."""
        assert self.id is not None
        tree = self._whole(self.id)
        self.name, self.system, self.branch, self._entries = tree.name, tree.system, tree.branch, list(tree.path())

    def _whole(self, session: int) -> Tree:
        with self._database.explained():
            found = reading.read_chat(self._connection, session)
        if found.damage:
            raise reading.damaged(session, found)
        return found.tree

    def release(self) -> None:
        """Say that the chat is not open here any more."""
        if self.is_detached:
            self._database.close()
        elif self.id is not None and not self.open_elsewhere:
            self._locks.release(self.id)

    def _place(self, question: TurnEntry | None) -> int:
        """Where in the conversation a question is."""
        if question is None or question not in self._entries:
            raise UsageError("there is no such turn", hint="ask something first")
        return self._entries.index(question)

    def _save(self, place: int, part: Question | Answer) -> None:
        """Save a question or an answer behind the first `place` entries: the end of the current branch from now on."""
        kept = self._entries[:place]
        parent = kept[-1].id if kept else None
        now = self._clock()
        with self._writing():
            session, name = self._session(part.shown if isinstance(part, Question) else "", now)
            added = rows.add_entry(self._connection, session, parent, part, now)
            rows.set_head(self._connection, session, self.branch, added.id)
            self._connection.execute("UPDATE sessions SET updated = ? WHERE id = ?", (now, session))
        if self.id is None:
            self._locks.claim(session)
        self.id, self.name, self._entries = session, name, [*kept, added]

    def _session(self, first: str, now: float) -> tuple[int, str]:
        """The chat's id and name, its row made with the first question."""
        if self.id is not None:
            return self.id, self.name
        wanted = self.name or rows.name_from(first)
        name = rows.free_name(self._connection, wanted)  # somebody may have taken it meanwhile
        return rows.add_session(self._connection, name, self.system, self.branch, now), name

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

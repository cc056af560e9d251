"""The tables of the saved chats: writing values of turns.py as rows, and reading them, where they are validated.

A chat with a row that breaks a rule is damaged, and is read in no part. A parent always has the lower id, so no damage
makes reading endless. Also the rules for names.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import closing, suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmrun.chat.media import MediaFile
from llmrun.chat.passages import Passage
from llmrun.chat.store.turns import Answer, Question, Tree, TurnEntry, answer_of, plain_facts
from llmrun.errors import LlmrunError, ResourceError, UsageError
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.codec import from_json, is_unicode, load_json
from llmrun.storage import SqliteSchema, is_damage, sqlite_errors

if TYPE_CHECKING:
    import sqlite3

FILE = "sessions.db"

# Entry n brings a file of version n to version n + 1; what is here never changes, new entries are added.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE models(
            id INTEGER PRIMARY KEY, name TEXT NOT NULL, sha256 TEXT NOT NULL, path TEXT NOT NULL,
            size INTEGER NOT NULL, modified REAL NOT NULL,
            UNIQUE(name, sha256, path, size, modified))""",
        """CREATE TABLE sessions(
            id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE COLLATE NOCASE, system TEXT NOT NULL,
            branch TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL)""",
        """CREATE TABLE messages(
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
            parent INTEGER REFERENCES messages, turn INTEGER NOT NULL, role TEXT NOT NULL,
            content TEXT NOT NULL, typed TEXT NOT NULL, created REAL NOT NULL)""",
        "CREATE INDEX messages_by_session ON messages(session)",
        "CREATE INDEX messages_by_parent ON messages(parent)",
        """CREATE TABLE answers(
            message INTEGER PRIMARY KEY REFERENCES messages ON DELETE CASCADE, reasoning TEXT NOT NULL,
            model INTEGER NOT NULL REFERENCES models, facts TEXT NOT NULL)""",
        """CREATE TABLE branches(
            session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE, name TEXT NOT NULL,
            head INTEGER REFERENCES messages, PRIMARY KEY(session, name)) WITHOUT ROWID""",
        "CREATE INDEX branches_by_head ON branches(head)",
        "CREATE TABLE marks(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    ),
    ("ALTER TABLE messages ADD COLUMN pictures TEXT NOT NULL DEFAULT ''",),
    ("ALTER TABLE messages ADD COLUMN passages TEXT NOT NULL DEFAULT ''",),
    ("DROP TABLE IF EXISTS words", "DROP TABLE marks"),  # an index for searches, which are scans now
    ("ALTER TABLE sessions ADD COLUMN documents TEXT NOT NULL DEFAULT ''",),
)

SCHEMA = SqliteSchema(
    "the saved chats",
    MIGRATIONS,
    # The newest parts of the file, where most damage shows.
    probes=("SELECT max(id) FROM messages", "SELECT name FROM sessions ORDER BY id DESC LIMIT 1"),
)


MAIN = "main"  # the first branch of every chat

_LONGEST_NAME = 80
_SLUG_LENGTH = 40
_NOT_IN_SLUG = re.compile(r"[\W_]+")


def checked_name(name: str) -> str:
    """Return a valid name of a chat or branch, stripped.

    Raises:
        UsageError: it is empty, too long, a number, begins with "-" or "#", or is not printable.
    """
    name = name.strip()
    # A number is an id, and "#7" is an end without a name.
    if not name or len(name) > _LONGEST_NAME or not name.isprintable() or name.isdecimal() or name[0] in "-#":
        raise UsageError(
            f"{name!r} can't be a name",
            why=f"must have 1 to {_LONGEST_NAME} printable characters, not begin with - or #, and not be a number",
        )
    return name


def name_from(text: str) -> str:
    """Return a name made of the first words of a question, in lower case, joined by hyphens."""
    words = _NOT_IN_SLUG.sub(" ", text[:400].lower()).split()
    name = ""
    for word in words:
        if name and len(name) + 1 + len(word) > _SLUG_LENGTH:
            break
        name = f"{name}-{word}" if name else word[:_SLUG_LENGTH]
    return name if name.isprintable() and name and not name.isdecimal() else f"chat-{name}".rstrip("-")


def free_name(connection: sqlite3.Connection, name_base: str) -> str:
    """Return the name, with a number appended if another chat has it."""
    name, number = name_base, 1
    while connection.execute("SELECT 1 FROM sessions WHERE name = ?", (name,)).fetchone():
        number += 1
        name = f"{name_base[: _LONGEST_NAME - 8]}-{number}"
    return name


def add_session(
    connection: sqlite3.Connection, name: str, system: str, branch: str, now: float, documents: str = ""
) -> int:
    """Insert a chat without turns; return its id."""
    row = connection.execute(
        "INSERT INTO sessions(name, system, branch, created, updated, documents) VALUES(?, ?, ?, ?, ?, ?)",
        (_text(name), _text(system), _text(branch), now, now, _text(documents)),
    )
    assert row.lastrowid is not None
    set_head(connection, row.lastrowid, branch, None)
    return row.lastrowid


def add_entry(
    connection: sqlite3.Connection, session: int, parent: int | None, part: Question | Answer, now: float
) -> TurnEntry:
    """Insert a question or an answer after a parent."""
    question = isinstance(part, Question)
    turn = connection.execute("SELECT turn FROM messages WHERE id = ?", (parent,)).fetchone()
    row = connection.execute(
        "INSERT INTO messages(session, parent, turn, role, content, typed, pictures, passages, created) "
        "VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            session,
            parent,
            (turn[0] if turn else 0) + (1 if question else 0),
            "user" if question else "assistant",
            _text(part.content),
            _text(part.typed) if isinstance(part, Question) else "",
            json.dumps(part.media) if isinstance(part, Question) and part.media else "",
            json.dumps(part.passages) if isinstance(part, Question) and part.passages else "",
            now,
        ),
    )
    assert row.lastrowid is not None
    if isinstance(part, Answer):
        facts = plain_facts(part)
        del facts["model"]
        connection.execute(
            "INSERT INTO answers(message, reasoning, model, facts) VALUES(?, ?, ?, ?)",
            (row.lastrowid, _text(part.reasoning), _model(connection, part.model), json.dumps(facts)),
        )
    return TurnEntry(row.lastrowid, parent, now, part)


def set_head(connection: sqlite3.Connection, session: int, branch: str, head: int | None) -> None:
    """Set the last message of a branch, which is made if needed."""
    connection.execute(
        "INSERT INTO branches(session, name, head) VALUES(?, ?, ?) "
        "ON CONFLICT(session, name) DO UPDATE SET head = excluded.head",
        (session, _text(branch), head),
    )


def add_tree(connection: sqlite3.Connection, tree: Tree, name: str) -> int:
    """Insert a whole chat under new ids; return the chat's id."""
    name = free_name(connection, name)
    session = add_session(connection, name, tree.system, tree.branch, tree.created, tree.documents)
    ids: dict[int, int] = {}
    for entry in tree.entries:
        part = entry.part
        if isinstance(part, Answer):
            part = _with_truncations(part, ids)
        parent = None if entry.parent is None else ids[entry.parent]
        ids[entry.id] = add_entry(connection, session, parent, part, entry.created).id
    for branch, head in tree.branches.items():
        set_head(connection, session, branch, None if head is None else ids[head])
    connection.execute("UPDATE sessions SET updated = ? WHERE id = ?", (tree.updated, session))
    return session


def _with_truncations(answer: Answer, ids: dict[int, int]) -> Answer:
    """Return the answer, with the dropped turns' new ids."""
    truncations = (replace(one, turns=tuple(ids.get(turn, turn) for turn in one.turns)) for one in answer.departures)
    return replace(answer, departures=tuple(truncations))


def _model(connection: sqlite3.Connection, model: ModelFingerprint) -> int:
    """Return the id of a model's row, which is made if needed."""
    values = tuple(_text(value) if isinstance(value, str) else value for value in astuple(model))
    connection.execute("INSERT OR IGNORE INTO models(name, sha256, path, size, modified) VALUES(?, ?, ?, ?, ?)", values)
    where = "name = ? AND sha256 = ? AND path = ? AND size = ? AND modified = ?"
    return int(connection.execute(f"SELECT id FROM models WHERE {where}", values).fetchone()[0])  # noqa: S608 - no input


def _text(text: str) -> str:
    """Return text that SQLite can store, without lone surrogates, which a terminal outside UTF-8 may produce."""
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text


_Record = TypeVar("_Record", MediaFile, Passage)
_FIRST_TIME, _LAST_TIME = -62_135_596_800.0, 253_402_300_799.0  # of the years 1 to 9999
_ENTRY = (
    "SELECT m.id, m.parent, m.turn, m.created, m.role, m.content, m.typed, m.pictures, m.passages, "
    "a.message, a.reasoning, a.model, a.facts FROM messages m LEFT JOIN answers a ON a.message = m.id "
)
_PATH = (
    "WITH RECURSIVE path(id, parent) AS (SELECT id, parent FROM messages WHERE id = ? "
    "UNION ALL SELECT m.id, m.parent FROM messages m JOIN path p ON m.id = p.parent AND m.id < p.id) "
)


class _DamageError(Exception):
    """A row that breaks a rule, by the message."""


def read_any_text(connection: sqlite3.Connection) -> None:
    """Let a connection read text that is not UTF-8, which is then reported as damage."""
    connection.text_factory = lambda data: str(data, "utf-8", "surrogateescape")


def chat_ids(connection: sqlite3.Connection, which: str = "") -> list[int]:
    """Return the ids of all chats that can be reached in a damaged file, or of those of a name or id."""
    if not which:
        return _ids(connection, "SELECT id FROM sessions NOT INDEXED ORDER BY id")
    # Ids are compared as text: a number may be longer than SQLite's.
    column, value = ("CAST(id AS TEXT)", str(int(which[:30]))) if which.isdecimal() else ("name", which)
    return _ids(connection, f"SELECT id FROM sessions NOT INDEXED WHERE {column} = ? ORDER BY id", value)  # noqa: S608 - no input


def read_chat(connection: sqlite3.Connection, session: int, *, only_texts: bool = False) -> Tree:
    """Read a chat.

    Args:
        only_texts: leave out the settings and statistics of answers, which take most of the time.

    Raises:
        UsageError: there is none of that id.
        ResourceError: it is damaged.
    """
    shown = f"the saved chat with the id {session}"
    try:
        query = "SELECT name, system, created, updated, branch, documents FROM sessions WHERE id = ?"
        row = connection.execute(query, (session,)).fetchone()
        if row is None:
            raise UsageError("this saved chat is gone", why="it was removed meanwhile")
        name = _stored_text(row[0], "its name")
        if not name:
            raise _DamageError("it has no name")
        shown = f"the saved chat {name!r} (id {session})"
        reader = _Reader(connection, only_texts=only_texts)
        for message in connection.execute(f"{_ENTRY}WHERE m.session = ? ORDER BY m.id", (session,)):
            reader.add(message)
        branches = reader.branches(session)
        branch = _stored_text(row[4], "the name of its current branch")
        if branch not in branches:
            raise _DamageError(f"its current branch {branch[:40]!r} does not exist")
        system, first, last = (
            _stored_text(row[1], "its system prompt"),
            _time(row[2], "its first day"),
            _time(row[3], "its last day"),
        )
        documents = _stored_text(row[5], "its folder of documents")
        return Tree(name, system, first, last, branch, branches, tuple(reader.entries.values()), documents)
    except _DamageError as error:
        why = str(error)
    except sqlite_errors() as error:
        if not is_damage(error):
            raise
        why = f"the file is damaged where it is kept ({error})"
    raise ResourceError(f"{shown} is damaged", why=why, hint=f"llmrun sessions rm {session} deletes it")


def examine(path: Path) -> tuple[int, list[str]] | None:
    """Read every saved chat of a file; change nothing.

    Returns:
        The number of chats, and a line for each damaged one, or for the file if no chat is. None if there is no file,
        or it is of another version.
    """
    import sqlite3

    if not path.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            if connection.execute("PRAGMA user_version").fetchone()[0] != len(MIGRATIONS):
                return None
            read_any_text(connection)
            sessions, damage = chat_ids(connection), []
            for session in sessions:
                try:
                    read_chat(connection, session)
                except LlmrunError as error:
                    damage.append(f"{error.what}: {error.why}")
            if not damage:
                finding = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
                damage = [] if finding == "ok" else [f"{path} is damaged: {finding}"]
            return len(sessions), damage
    except sqlite_errors() as error:
        return 0, [f"{path} can't be read: {error}"]


def copy_sound(old: sqlite3.Connection, new: sqlite3.Connection) -> str:
    """Copy the sound chats of a damaged file into a new one, in a transaction; return a summary."""
    read_any_text(old)
    sessions, trees = chat_ids(old), []
    for session in sessions:
        with suppress(LlmrunError):
            trees.append(read_chat(old, session))
    for tree in sorted(trees, key=lambda tree: tree.last_id):  # the last used stays the last used
        add_tree(new, tree, tree.name)
    return f"{len(trees)} of {len(sessions)} chats are in a new one" if sessions else ""


def read_path(connection: sqlite3.Connection, head: int | None) -> list[TurnEntry]:
    """Read the conversation that ends with an entry of a chat, from its first question on.

    Raises:
        ResourceError: it is damaged.
    """
    if head is None:
        return []
    reader = _Reader(connection)
    try:
        # A child always has the higher id.
        for row in connection.execute(_PATH + _ENTRY + "WHERE m.id IN (SELECT id FROM path) ORDER BY m.id", (head,)):  # noqa: S608 - no input
            reader.add(row)
    except _DamageError as error:
        raise ResourceError("this saved chat is damaged", why=str(error)) from None
    return list(reader.entries.values())


class _Reader:
    """The entries of one chat, by id, parents before their children. A row that breaks a rule raises _DamageError."""

    def __init__(self, connection: sqlite3.Connection, *, only_texts: bool = False) -> None:
        self.entries: dict[int, TurnEntry] = {}
        self._connection, self._only_texts = connection, only_texts
        self._models: dict[Any, ModelFingerprint] = {}

    def add(self, row: Any) -> None:
        """Add a message."""
        number, parent, turn, created, role, content, typed, pictures, passages, answered, reasoning, model, facts = row
        where = f"message {number}"
        if role not in ("user", "assistant"):
            raise _DamageError(f"{where} is from neither user nor model")
        above = self.entries.get(parent) if type(parent) is int else None
        is_first = parent is None and role == "user"
        if not (above.role != role if above else is_first):
            raise _DamageError(f"{where} {_misplaced(number, parent)}")
        if type(turn) is not int:
            raise _DamageError(f"{where} has no turn number")
        text = _stored_text(content, f"{where}: its text")
        part: Question | Answer
        if role == "user":
            part = Question(
                text,
                _stored_text(typed, f"{where}: what was typed"),
                _records(MediaFile, pictures, f"{where}: its list of files"),
                _records(Passage, passages, f"{where}: its list of passages"),
            )
        elif answered is None:
            raise _DamageError(f"{where}: what made the answer is missing")
        else:
            part = self._answer(text, reasoning, model, facts, where)
        self.entries[number] = TurnEntry(
            number, above.id if above else None, _time(created, f"{where}: its time"), part
        )

    def branches(self, session: int) -> dict[str, int | None]:
        """Return name -> id of the last message of each branch."""
        branches: dict[str, int | None] = {}
        for name, head in self._connection.execute("SELECT name, head FROM branches WHERE session = ?", (session,)):
            shown = _stored_text(name, "the name of a branch")
            if head is not None and head not in self.entries:
                raise _DamageError(f"the branch {shown[:40]!r} ends with a message that is not in this chat")
            branches[shown] = head
        return branches

    def _answer(self, content: str, reasoning: Any, model: Any, facts: Any, where: str) -> Answer:
        thought = _stored_text(reasoning, f"{where}: its reasoning")
        if model not in self._models:
            self._models[model] = self._model(model, where)
        text = _stored_text(facts, f"{where}: what made the answer")
        try:
            if self._only_texts:
                load_json(text)  # without the checks of _plain(), which take four times as long
                return Answer(content, thought, model=self._models[model])
            return answer_of(content, thought, _plain(text), self._models[model])
        except _UNREADABLE as error:
            raise _DamageError(f"{where}: what made the answer can't be read ({str(error)[:80]})") from None

    def _model(self, number: Any, where: str) -> ModelFingerprint:
        query = "SELECT name, sha256, path, size, modified FROM models WHERE id = ?"
        # Where the column's type is damaged, SQLite returns a whole number of `modified` as an integer.
        row: Any = self._connection.execute(query, (number,)).fetchone() or (None,) * 5
        name, sha256, path, size, modified = row
        is_sound = all(type(text) is str and is_unicode(text) for text in (name, sha256, path))
        if not is_sound or type(size) is not int or type(modified) not in (int, float):
            raise _DamageError(f"{where}: the model that answered can't be read")
        return ModelFingerprint(name, sha256, path, size, float(modified))


def _misplaced(number: int, parent: Any) -> str:
    """Return why a message can't follow its parent."""
    if parent == number:
        return "is its own parent"
    if parent is None:
        return "answers no question"
    if type(parent) is int and parent > number:
        return f"follows message {parent}, which is newer"
    return f"follows message {str(parent)[:20]}, which it can't follow in this chat"


def _ids(connection: sqlite3.Connection, query: str, *values: int | str) -> list[int]:
    """Return ids in ascending order, read from both ends of the table up to the damage."""
    ids: set[int] = set()
    for direction in ("ASC", "DESC"):
        try:
            ids.update(row[0] for row in connection.execute(f"{query} {direction}", values))
        except sqlite_errors() as error:
            if not is_damage(error):
                raise
            continue
        break
    return sorted(ids)


# ---- values ----------------------------------------------------------------------------------------

_UNREADABLE = (ValueError, TypeError, AttributeError, LlmrunError)


def _stored_text(value: Any, what: str) -> str:
    if type(value) is str and is_unicode(value):  # read_any_text() found UTF-8
        return value
    raise _DamageError(f"{what} is not {'UTF-8' if type(value) is str else 'text'}")


def _time(value: Any, what: str) -> float:
    """Return seconds since 1970."""
    if type(value) in (int, float) and _FIRST_TIME <= value <= _LAST_TIME:
        return float(value)
    raise _DamageError(f"{what} is not a time")


def _records(kind: type[_Record], text: Any, what: str) -> tuple[_Record, ...]:
    """Return the tuples in a column: a JSON list of lists, "" for none."""
    if text == "":
        return ()
    try:
        rows = _plain(_stored_text(text, what))
        return tuple(from_json(kind, dict(zip(kind._fields, row, strict=True))) for row in rows)
    except _UNREADABLE as error:
        raise _DamageError(f"{what} can't be read ({str(error)[:80]})") from None


def _plain(text: str) -> Any:
    """Parse JSON text that can be written again.

    Raises:
        ValueError: the text is something else.
    """
    value = load_json(text, has_paths=True, parse_float=_finite, parse_constant=_finite)
    if "\\ud" in text.lower():  # perhaps half of a character
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value

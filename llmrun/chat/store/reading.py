"""Reading: rows of the saved chats' tables become values of turns.py. The one place where they are validated.

Owns the rules of a sound chat, and the reading of a damaged one: every row is read at most a few times, and a parent
always has the lower id, so no damage makes reading endless. Must not know files, locks or users.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun.chat.images import ImageFile
from llmrun.chat.store.rows import MAIN
from llmrun.chat.store.turns import Answer, Question, Tree, TurnEntry, answer_of
from llmrun.errors import LlmrunError, ResourceError, UsageError
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.codec import from_json, load_json
from llmrun.storage import is_damage, sqlite_errors

if TYPE_CHECKING:
    import sqlite3

_FIRST_TIME, _LAST_TIME = -62_135_596_800.0, 253_402_300_799.0  # of the years 1 to 9999
_ENTRY = (
    "SELECT m.id, m.parent, m.turn, m.created, m.role, m.content, m.typed, m.pictures, "
    "a.message, a.reasoning, a.model, a.facts FROM messages m LEFT JOIN answers a ON a.message = m.id "
)
_PATH = (
    "WITH RECURSIVE path(id, parent) AS (SELECT id, parent FROM messages WHERE id = ? "
    "UNION ALL SELECT m.id, m.parent FROM messages m JOIN path p ON m.id = p.parent AND m.id < p.id) "
)
_UNSOUND = f"""
    SELECT s.id FROM sessions s LEFT JOIN branches b ON b.session = s.id AND b.name = s.branch
    WHERE b.name IS NULL OR typeof(s.name) || typeof(s.system) <> 'texttext' OR s.name = ''
        OR NOT is_text(CAST(s.name || s.system AS BLOB))
        OR NOT coalesce(max(s.created, s.updated) <= {_LAST_TIME} AND min(s.created, s.updated) >= {_FIRST_TIME}, 0)
    UNION SELECT b.session FROM branches b LEFT JOIN messages h ON h.id = b.head
    WHERE typeof(b.name) <> 'text' OR NOT is_text(CAST(b.name AS BLOB))
        OR (b.head IS NOT NULL AND h.session IS NOT b.session)
    UNION SELECT m.session FROM messages m LEFT JOIN messages p ON p.id = m.parent
        LEFT JOIN answers a ON a.message = m.id LEFT JOIN models o ON o.id = a.model
    WHERE typeof(m.turn) <> 'integer' OR typeof(m.content) || typeof(m.typed) || typeof(m.pictures) <> 'texttexttext'
        OR m.role NOT IN ('user', 'assistant') OR NOT coalesce(m.created BETWEEN {_FIRST_TIME} AND {_LAST_TIME}, 0)
        OR NOT coalesce(p.session = m.session AND p.id < m.id AND p.role <> m.role,
            m.parent IS NULL AND m.role = 'user')
        OR NOT is_text(CAST(m.content || m.typed || m.pictures AS BLOB))
        OR (m.role = 'assistant' AND NOT coalesce(typeof(a.reasoning) || typeof(a.facts) = 'texttext'
            AND typeof(o.name) || typeof(o.sha256) || typeof(o.path) = 'texttexttext'
            AND typeof(o.size) || typeof(o.modified) IN ('integerreal', 'integerinteger')
            AND is_text(CAST(a.reasoning AS BLOB))
            AND is_text(CAST(o.name || o.sha256 || o.path AS BLOB)) AND is_json(CAST(a.facts AS BLOB)), 0))
"""  # noqa: S608 - no input


class ChatReading(NamedTuple):
    """The readable part of a chat."""

    tree: Tree  # of a damaged chat, unreadable parts are replaced or left out
    damage: tuple[str, ...]  # a line for each error; empty for a sound chat

    @property
    def why(self) -> str:
        """The damage in a line; "" for none."""
        more = f", and {len(self.damage) - 1} more" if len(self.damage) > 1 else ""
        return "".join(self.damage[:1]) + more


def prepare(connection: sqlite3.Connection) -> None:
    """Let a connection read text that is not UTF-8, and add the SQL functions of unsound_chats()."""
    connection.text_factory = lambda data: str(data, "utf-8", "surrogateescape")
    connection.create_function("is_text", 1, _is_text, deterministic=True)
    connection.create_function("is_json", 1, _is_json, deterministic=True)


def unsound_chats(connection: sqlite3.Connection) -> set[int]:
    """Return the ids of the chats with rows that break a rule: a quick check of types, ids and encodings."""
    query = f"SELECT id FROM sessions NOT INDEXED WHERE id IN ({_UNSOUND})"  # noqa: S608 - no input
    return {row[0] for row in connection.execute(query)}


def file_damage(connection: sqlite3.Connection) -> str:
    """Return the first thing that SQLite finds wrong with the file itself; "" for nothing. Reads all of it."""
    try:
        found = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
    except sqlite_errors() as error:
        return str(error)
    return "" if found == "ok" else found


def chat_ids(connection: sqlite3.Connection, which: str = "") -> list[int]:
    """Return the ids of all chats that can be reached in a damaged file, or of those of a name or id."""
    if not which:
        return _ids(connection, "SELECT id FROM sessions NOT INDEXED ORDER BY id")
    # Ids are compared as text: a number may be longer than SQLite's.
    column, value = ("CAST(id AS TEXT)", str(int(which[:30]))) if which.isdecimal() else ("name", which)
    return _ids(connection, f"SELECT id FROM sessions NOT INDEXED WHERE {column} = ? ORDER BY id", value)  # noqa: S608 - no input


def read_chat(connection: sqlite3.Connection, session: int) -> ChatReading:
    """Read a whole chat.

    Raises:
        UsageError: there is none of that id.
        sqlite3.Error: the row of the chat itself can't be read.
    """
    row = connection.execute(
        "SELECT name, system, created, updated, branch FROM sessions WHERE id = ?", (session,)
    ).fetchone()
    if row is None:
        raise UsageError("this saved chat is gone", why="it was removed meanwhile")
    reader = _Reader(connection)
    name = reader.text(row[0], "its name")
    for message in reader.rows(session):
        reader.add(message)
    branches = reader.branches(session)
    branch = reader.text(row[4], "the name of its current branch")
    if branch not in branches:
        reader.damage.append(f"its current branch {branch[:40]!r} does not exist")
        branch = MAIN if MAIN in branches or not branches else next(iter(branches))
        branches.setdefault(branch, max(reader.entries, default=None))
    tree = Tree(
        name or f"chat-{session}",
        reader.text(row[1], "its system prompt"),
        reader.time(row[2], "its first day"),
        reader.time(row[3], "its last day"),
        branch,
        branches,
        tuple(reader.entries.values()),
    )
    if not name:
        reader.damage.append("it has no name")
    return ChatReading(tree, tuple(reader.damage))


def damaged(session: int, found: ChatReading) -> ResourceError:
    """Make the error for a damaged chat."""
    return ResourceError(
        f"the saved chat {found.tree.name!r} (id {session}) is damaged",
        why=found.why,
        hint=f"llmrun sessions export {session} writes what can be read; llmrun sessions repair saves it in a new file",
    )


def read_path(connection: sqlite3.Connection, head: int | None) -> list[TurnEntry]:
    """Read the conversation that ends with an entry of a sound chat, from its first question on."""
    if head is None:
        return []
    reader = _Reader(connection)
    # A child always has the higher id.
    for row in connection.execute(_PATH + _ENTRY + "WHERE m.id IN (SELECT id FROM path) ORDER BY m.id", (head,)):  # noqa: S608 - no input
        reader.add(row)
    return list(reader.entries.values())


class _Reader:
    """The entries of one chat, parents before their children, and the damage found so far.

    Attributes:
        entries: by id.
        damage: a line each.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.entries: dict[int, TurnEntry] = {}
        self.damage: list[str] = []
        self._connection = connection
        self._models: dict[Any, ModelFingerprint | None] = {}

    def rows(self, session: int) -> list[Any]:
        """Return the message rows of a chat; in a damaged file, the readable ones."""
        try:
            return self._connection.execute(f"{_ENTRY}WHERE m.session = ? ORDER BY m.id", (session,)).fetchall()
        except sqlite_errors() as error:
            if not is_damage(error):
                raise
            self.damage.append(f"the file is damaged where it is kept ({error})")
        rows = []
        # Through the index and, where that is damaged, through the table.
        queries = (f"SELECT id FROM messages {how} WHERE session = ? ORDER BY id" for how in ("", "NOT INDEXED"))  # noqa: S608 - no input
        found = {number for query in queries for number in _ids(self._connection, query, session)}
        for number in sorted(found):
            with suppress(*sqlite_errors()):
                rows += self._connection.execute(f"{_ENTRY}WHERE m.id = ?", (number,)).fetchall()
        return rows

    def add(self, row: Any) -> None:
        """Add a message. One that has no place is put after the last one that it can follow."""
        number, parent, turn, created, role, content, typed, pictures, answered, reasoning, model, facts = row
        where = f"message {number}"
        if role not in ("user", "assistant"):
            self.damage.append(f"{where} is from neither user nor model")
            role = "user" if answered is None else "assistant"
        above = self.entries.get(parent) if type(parent) is int else None
        is_first = parent is None and role == "user"
        if not (above.role != role if above else is_first):
            self.damage.append(f"{where} {_misplaced(number, parent)}")
            above = next((entry for entry in reversed(self.entries.values()) if entry.role != role), None)
            if above is None and role == "assistant":
                return
        if type(turn) is not int:
            self.damage.append(f"{where} has no turn number")
        text = self.text(content, f"{where}: its text")
        part: Question | Answer
        if role == "user":
            part = Question(text, self.text(typed, f"{where}: what was typed"), self._pictures(pictures, where))
        else:
            part = self._answer(text, reasoning, model, facts, where)
        time = self.time(created, f"{where}: its time")
        self.entries[number] = TurnEntry(number, above.id if above else None, time, part)

    def branches(self, session: int) -> dict[str, int | None]:
        """Return name -> id of the last message of each branch."""
        query, found = "SELECT name, head FROM branches WHERE session = ?", {}
        for name, head in self._reachable(query, session):
            shown = self.text(name, "the name of a branch")
            if head is not None and head not in self.entries:
                self.damage.append(f"the branch {shown[:40]!r} ends with a message that is not in this chat")
                head = max(self.entries, default=None)
            found[shown] = head
        return found

    def text(self, value: Any, what: str) -> str:
        """Return a text, with U+FFFD instead of bytes that are not UTF-8."""
        if type(value) is str and _is_unicode(value):
            return value
        self.damage.append(f"{what} is not {'UTF-8' if type(value) is str else 'text'}")
        raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        return (raw if isinstance(raw, bytes) else b"").decode("utf-8", "replace")

    def time(self, value: Any, what: str) -> float:
        """Return seconds since 1970; 0 for a value that is not a time."""
        if type(value) in (int, float) and _FIRST_TIME <= value <= _LAST_TIME:
            return float(value)
        self.damage.append(f"{what} is not a time")
        return 0.0

    def _answer(self, content: str, reasoning: Any, model: Any, facts: Any, where: str) -> Answer:
        if facts is None:
            self.damage.append(f"{where}: what made the answer is missing")
            return Answer(content)
        thought = self.text(reasoning, f"{where}: its reasoning")
        if model not in self._models:
            self._models[model] = self._model(model)
        used = self._models[model]
        if used is None:
            self.damage.append(f"{where}: the model that answered can't be read")
        used = used or ModelFingerprint("")
        try:
            return answer_of(content, thought, _plain(self.text(facts, f"{where}: what made the answer")), used)
        except _UNREADABLE as error:
            self.damage.append(f"{where}: what made the answer can't be read ({str(error)[:80]})")
        return Answer(content, thought, model=used)

    def _pictures(self, text: Any, where: str) -> tuple[ImageFile, ...]:
        if text == "":
            return ()
        try:
            files = _plain(self.text(text, f"{where}: its list of images"))
            fields = ImageFile._fields
            return tuple(from_json(ImageFile, dict(zip(fields, file, strict=True))) for file in files)
        except _UNREADABLE as error:
            self.damage.append(f"{where}: its list of images can't be read ({str(error)[:80]})")
        return ()

    def _model(self, number: Any) -> ModelFingerprint | None:
        rows = self._reachable("SELECT name, sha256, path, size, modified FROM models WHERE id = ?", number)
        # Where the column's type is damaged, SQLite returns a whole number of `modified` as an integer.
        row: Any = next(rows, (None,) * 5)
        name, sha256, path, size, modified = row
        is_sound = all(type(text) is str and _is_unicode(text) for text in (name, sha256, path))
        if not is_sound or type(size) is not int or type(modified) not in (int, float):
            return None
        return ModelFingerprint(name, sha256, path, size, float(modified))

    def _reachable(self, query: str, *values: Any) -> Iterator[Any]:
        """Yield rows up to the first one that can't be read."""
        try:
            yield from self._connection.execute(query, values)
        except sqlite_errors() as error:
            if not is_damage(error):
                raise
            self.damage.append(f"the file is damaged where it is kept ({error})")


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
    found: set[int] = set()
    for direction in ("ASC", "DESC"):
        try:
            found.update(row[0] for row in connection.execute(f"{query} {direction}", values))
        except sqlite_errors() as error:
            if not is_damage(error):
                raise
            continue
        break
    return sorted(found)


# ---- values ----------------------------------------------------------------------------------------

_UNREADABLE = (ValueError, TypeError, AttributeError, LlmrunError)


def _plain(text: str) -> Any:
    """Parse JSON text that can be written again.

    Raises:
        ValueError: the text is something else.
    """
    found = load_json(text, parse_float=_finite, parse_constant=_finite)
    if "\\ud" in text.lower():  # perhaps half of a character
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _is_unicode(text: str) -> bool:
    return text.isascii() or _is_text(text.encode("utf-8", "surrogateescape"))


def _is_text(data: Any) -> bool:
    try:
        return isinstance(data, bytes) and (data.isascii() or bool(data.decode()))
    except UnicodeDecodeError:
        return False


def _is_json(data: Any) -> bool:
    try:
        load_json(data)  # without the checks of _plain(), which take four times as long
    except _UNREADABLE:
        return False
    return True

"""Writing: values of turns.py become rows of the saved chats' tables. Also the rules for names.

reading.py reads rows.
"""

from __future__ import annotations

import json
import re
from dataclasses import astuple
from typing import TYPE_CHECKING

from llmrun.chat.store.turns import Answer, Question, Tree, TurnEntry, plain_facts
from llmrun.errors import UsageError
from llmrun.models.fingerprint import ModelFingerprint

if TYPE_CHECKING:
    import sqlite3

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


def add_session(connection: sqlite3.Connection, name: str, system: str, branch: str, now: float) -> int:
    """Insert a chat without turns; return its id."""
    row = connection.execute(
        "INSERT INTO sessions(name, system, branch, created, updated) VALUES(?, ?, ?, ?, ?)",
        (_text(name), _text(system), _text(branch), now, now),
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
            json.dumps(part.images) if isinstance(part, Question) and part.images else "",
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
    session = add_session(connection, free_name(connection, name), tree.system, tree.branch, tree.created)
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
    from dataclasses import replace

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

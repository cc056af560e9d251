"""Full-text search in saved chats: SQLite's FTS5 where it is built in, else a scan.

Owns the index, which is updated by a search: saving a turn never waits for it, and a Python without FTS5 can write to
the same file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlite3

    from llmrun.chat.store.turns import Tree

_MARK = "indexed"  # the highest message id that the index holds
_AROUND = 40  # characters of an excerpt before the match
_EXCERPT = 160
_HIT = "SELECT s.name, m.id, m.turn, m.role, m.created, m.content "


@dataclass(frozen=True, slots=True)
class Hit:
    """A message that matches."""

    session: str  # name of its chat
    message: int  # its id
    turn: int  # from 1 on
    role: str  # "user" or "assistant"
    created: float  # seconds since 1970
    excerpt: str  # the text around the first match, on one line


def search(connection: sqlite3.Connection, text: str, limit: int, but: Collection[int] = ()) -> list[Hit]:
    """Return the messages that contain every word or a word that begins like it, best first, undone ones too.

    Args:
        connection: inside a transaction, because the index may grow.
        text: words; case, accents and punctuation do not matter.
        limit: maximum number of hits.
        but: ids of chats to leave out.
    """
    words = text.split()
    if not words:
        return []
    found = _by_index(connection, words, limit, but) if _catch_up(connection) else []
    # The index knows whole words and their beginnings; a part of a word, or of a text without spaces, is scanned for.
    return found or _by_scan(connection, words, limit, but)


def search_trees(trees: Iterable[Tree], text: str, limit: int) -> list[Hit]:
    """Search chats that were read whole, newest messages first: for a file whose index can't be read."""
    words = text.lower().split()
    found: list[Hit] = []
    for tree in trees if words else ():
        turns: dict[int | None, int] = {None: 0}
        for entry in tree.entries:
            turn = turns[entry.id] = turns[entry.parent] + (entry.role == "user")
            content = entry.part.content
            if all(word in content.lower() for word in words):
                found.append(Hit(tree.name, entry.id, turn, entry.role, entry.created, _excerpt(content, words)))
    return sorted(found, key=lambda hit: -hit.message)[:limit]


def forget(connection: sqlite3.Connection, session: int) -> None:
    """Remove a chat's messages from the index, before they are deleted."""
    if not _has_index(connection):
        return
    import sqlite3

    # Without FTS5 the index keeps entries that lead nowhere; ids are never used again.
    with suppress(sqlite3.OperationalError):
        connection.execute(
            "INSERT INTO words(words, rowid, content) SELECT 'delete', id, content FROM messages "
            "WHERE session = ? AND id <= (SELECT value FROM marks WHERE name = ?)",
            (session, _MARK),
        )
        connection.execute("INSERT INTO words(words) VALUES('optimize')")  # or the words would stay in the file


def _catch_up(connection: sqlite3.Connection) -> bool:
    """Add new messages to the index; return False if SQLite has no FTS5."""
    import sqlite3

    try:
        if not _has_index(connection):
            connection.execute(
                "CREATE VIRTUAL TABLE words USING fts5(content, content='messages', content_rowid='id', "
                "tokenize='unicode61 remove_diacritics 2')"
            )
            connection.execute("INSERT OR REPLACE INTO marks(name, value) VALUES(?, 0)", (_MARK,))
        connection.execute(
            "INSERT INTO words(rowid, content) SELECT id, content FROM messages "
            "WHERE id > (SELECT value FROM marks WHERE name = ?)",
            (_MARK,),
        )
    except sqlite3.OperationalError as error:
        if "no such module" in str(error):
            return False
        raise
    connection.execute("UPDATE marks SET value = (SELECT coalesce(max(id), 0) FROM messages) WHERE name = ?", (_MARK,))
    return True


def _has_index(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'words'").fetchone())


def _by_index(connection: sqlite3.Connection, words: list[str], limit: int, but: Collection[int]) -> list[Hit]:
    query = " ".join('"' + word.replace('"', '""') + '"*' for word in words if any(map(str.isalnum, word)))
    if not query:
        return []
    rows = connection.execute(
        _HIT + "FROM words JOIN messages m ON m.id = words.rowid JOIN sessions s ON s.id = m.session "
        f"WHERE words MATCH ? AND {_not_in(but)} ORDER BY rank, m.id DESC LIMIT ?",
        (query, limit),
    )
    return [_hit(row, words) for row in rows]


def _by_scan(connection: sqlite3.Connection, words: list[str], limit: int, but: Collection[int]) -> list[Hit]:
    patterns = ["%" + "".join(f"\\{char}" if char in "%_\\" else char for char in word) + "%" for word in words]
    conditions = " AND ".join("m.content LIKE ? ESCAPE '\\'" for _ in patterns)
    query = f"{_HIT}FROM messages m JOIN sessions s ON s.id = m.session WHERE {_not_in(but)} AND {conditions}"
    rows = connection.execute(query + " ORDER BY m.id DESC LIMIT ?", (*patterns, limit))
    return [_hit(row, words) for row in rows]


def _not_in(but: Collection[int]) -> str:
    return f"s.id NOT IN ({', '.join(map(str, but))})"


def _hit(row: Any, words: list[str]) -> Hit:
    session, message, turn, role, created, content = row
    return Hit(session, message, turn, role, created, _excerpt(content, words))


def _excerpt(text: str, words: list[str]) -> str:
    lower = text.lower()
    places = [place for word in words if (place := lower.find(word.lower())) >= 0]
    start = max(0, min(places, default=0) - _AROUND)
    end = start + _EXCERPT
    excerpt = " ".join(text[start:end].split())
    return f"{'…' if start else ''}{excerpt}{'…' if end < len(text) else ''}"

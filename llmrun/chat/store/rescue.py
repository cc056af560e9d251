"""Damaged files of saved chats: examine one, and copy the readable chats into a new one.

Owns the choice of chats and the summary. Changes nothing in the damaged file.
"""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmrun.chat.store import reading, rows
from llmrun.chat.store.schema import FILE, MIGRATIONS
from llmrun.errors import UsageError
from llmrun.storage import sqlite_errors

if TYPE_CHECKING:
    import sqlite3


class Health(NamedTuple):
    """The state of a file of saved chats."""

    n_chats: int  # damaged ones included
    damage: tuple[str, ...]  # a line for each damaged chat, or for the file if no chat is


def examine(folder: Path) -> Health | None:
    """Read every saved chat; return None if there are none, or the file is of another version."""
    import sqlite3

    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            if connection.execute("PRAGMA user_version").fetchone()[0] != len(MIGRATIONS):
                return None
            reading.prepare(connection)
            sessions = reading.chat_ids(connection)
            found = [line for session in sessions if (line := _damage(connection, session))]
            return Health(len(sessions), tuple(found) or tuple(filter(None, [reading.file_damage(connection)])))
    except sqlite_errors() as error:
        return Health(0, (f"{path} can't be read: {error}",))


def _damage(connection: sqlite3.Connection, session: int) -> str:
    try:
        found = reading.read_chat(connection, session)
    except sqlite_errors(UsageError) as error:
        return f"the saved chat with the id {session} can't be read: {error}"
    return str(reading.damaged(session, found)) if found.damage else ""


def copy_readable(old: sqlite3.Connection, new: sqlite3.Connection) -> str:
    """Copy every chat that can be read, in whole or in part; return a summary.

    Args:
        old: damaged.
        new: empty, in a transaction.
    """
    reading.prepare(old)
    chats: list[tuple[int, reading.ChatReading]] = []
    sessions = reading.chat_ids(old)
    for session in sessions:
        with suppress(*sqlite_errors(UsageError)):
            chats.append((session, reading.read_chat(old, session)))
    for session, found in sorted(chats, key=lambda chat: chat[1].tree.last_id):  # the last used stays the last used
        rows.add_tree(new, found.tree, _name(found.tree.name, session))
    partly = sum(bool(found.damage) for _, found in chats)
    whole, lost = len(chats) - partly, len(sessions) - len(chats)
    summary = f"{whole} of {whole + partly + lost} chats are whole in a new one" if whole + partly else ""
    return f"{summary}, {partly} in part" if summary and partly else summary


def _name(name: str, session: int) -> str:
    try:
        return rows.checked_name(name)
    except UsageError:
        return f"chat-{session}"

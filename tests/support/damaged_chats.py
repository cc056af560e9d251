"""Files of saved chats with damage: in single rows, as a program or a disk may leave them, and in bytes."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

from llmrun.chat.store.rows import FILE
from llmrun.chat.store.store import Sessions
from llmrun.chat.store.turns import Answer, Question
from llmrun.models.fingerprint import ModelFingerprint
from support.chats import add_turn

NAMES = ("rome", "bread", "rain", "chess", "trees")
HURT = 3
"""The id of the chat that is damaged: "rain"."""

ROWS: dict[str, tuple[str, str]] = {
    "its own parent": (
        "UPDATE messages SET parent = id WHERE id = (SELECT max(id) FROM messages WHERE session = 3)",
        "is its own parent",
    ),
    "a cycle": (
        "UPDATE messages SET parent = (SELECT max(id) FROM messages WHERE session = 3) "
        "WHERE id = (SELECT min(id) + 2 FROM messages WHERE session = 3)",
        "which is newer",
    ),
    "a parent elsewhere": (
        "UPDATE messages SET parent = 1 WHERE id = (SELECT max(id) FROM messages WHERE session = 3)",
        "which it can't follow",
    ),
    "no JSON": (
        "UPDATE answers SET facts = '{' WHERE message = (SELECT max(id) FROM messages WHERE session = 3)",
        "what made the answer can't be read",
    ),
    "nested JSON": (
        "UPDATE answers SET facts = replace(hex(zeroblob(100000)), '00', '[') "
        "WHERE message = (SELECT max(id) FROM messages WHERE session = 3)",
        "what made the answer can't be read",
    ),
    "an unknown branch": ("UPDATE sessions SET branch = 'nowhere' WHERE id = 3", "branch 'nowhere' does not exist"),
    "an unknown end": ("UPDATE branches SET head = 1 WHERE session = 3", "ends with a message that is not in this"),
    "a blob": ("UPDATE messages SET content = x'00ff' WHERE session = 3", "its text is not text"),
    "a blob typed": ("UPDATE messages SET typed = x'ff' WHERE session = 3", "what was typed is not text"),
    "no UTF-8": (
        "UPDATE messages SET content = CAST(x'6869ff' AS TEXT) "
        "WHERE id = (SELECT min(id) FROM messages WHERE session = 3)",
        "its text is not UTF-8",
    ),
    "a name of no UTF-8": ("UPDATE sessions SET name = CAST(x'ff' AS TEXT) WHERE id = 3", "its name is not UTF-8"),
    "no time": ("UPDATE sessions SET updated = 1e300 WHERE id = 3", "is not a time"),
    "no role": ("UPDATE messages SET role = 'nobody' WHERE session = 3", "is from neither user nor model"),
    "no model": (
        "UPDATE answers SET model = 99 WHERE message = (SELECT max(id) FROM messages WHERE session = 3)",
        "the model that answered can't be read",
    ),
    "no answer": (
        "DELETE FROM answers WHERE message = (SELECT max(id) FROM messages WHERE session = 3)",
        "what made the answer is missing",
    ),
}  # fmt: skip
"""What is done to the file, and what is said of it."""

DEEP: dict[str, tuple[str, str]] = {
    "other JSON": (
        "UPDATE answers SET facts = '[]' WHERE message > 0 AND model = 2",
        "what made the answer can't be read",
    ),
    "an endless number": (
        'UPDATE answers SET facts = \'{"stats": {"load_seconds": 1e999}}\' WHERE model = 2',
        "not a finite number",
    ),
    "half a character": ('UPDATE answers SET facts = \'{"finish": "\\ud83d"}\' WHERE model = 2', "can't be read"),
}
"""The same, seen when the chat is opened, not when chats are listed."""


def make_chats(folder: Path, *, filler: int = 30) -> None:
    """Five chats of some turns; only the one to be hurt has a second model."""
    ticks = iter(range(1_700_000_000, 1_800_000_000))
    with Sessions(folder, clock=lambda: float(next(ticks))) as sessions:
        for name in NAMES:
            chat = sessions.new(name)
            for turn in range(3):
                model = ModelFingerprint("second" if name == NAMES[HURT - 1] else "first")
                add_turn(chat, Question(f"{name} question {turn} é"), Answer(f"{name} word " * filler, model=model))


def hurt(folder: Path, statement: str) -> None:
    """Change the file as no llmrun does."""
    connection = sqlite3.connect(folder / FILE)
    connection.execute(statement)
    connection.commit()
    connection.close()


def flip(data: bytes, seed: int) -> bytes:
    """The bytes with some of them, in one place or in several, changed."""
    chance = random.Random(seed)
    changed = bytearray(data)
    for _ in range(chance.choice((1, 3, 20))):
        place, length = chance.randrange(len(data)), chance.choice((1, 1, 8, 200))
        for at in range(place, min(place + length, len(data))):
            changed[at] = chance.randrange(256)
    return bytes(changed)


def rows_by_chat(path: Path, lower: Callable[[bytes], object] = bytes) -> dict[int, list[tuple[object, ...]]]:
    """Every row that SQLite still gives of each chat, without llmrun's own code; those that can't be read are left out.

    A chat of which a row can't be read is not there.
    """
    found: dict[int, list[tuple[object, ...]]] = {}
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    connection.text_factory = lower
    try:
        for session in range(1, len(NAMES) + 1):
            queries = (
                "SELECT * FROM sessions WHERE id = ?",
                "SELECT * FROM branches WHERE session = ?",
                "SELECT id FROM messages NOT INDEXED WHERE session = ?",  # the index below may be damaged alone
                "SELECT m.*, a.*, o.* FROM messages m LEFT JOIN answers a ON a.message = m.id "
                "LEFT JOIN models o ON o.id = a.model WHERE m.session = ? ORDER BY m.id",
            )
            try:
                schema = connection.execute("SELECT sql FROM sqlite_master").fetchall()  # with the names of the columns
                rows = [row for query in queries for row in connection.execute(query, (session,))]
                found[session] = [*schema, *rows]
            except (sqlite3.Error, UnicodeDecodeError):  # the latter where an error's own words are damaged
                continue
    finally:
        connection.close()
    return found

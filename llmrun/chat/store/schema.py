"""The tables of the SQLite file that chats are saved in."""

from __future__ import annotations

from llmrun.storage import SqliteSchema

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
)

SCHEMA = SqliteSchema(
    "the saved chats",
    MIGRATIONS,
    # The newest parts of the file, where most damage shows.
    probes=("SELECT max(id) FROM messages", "SELECT name FROM sessions ORDER BY id DESC LIMIT 1"),
)

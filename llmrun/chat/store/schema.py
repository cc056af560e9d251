"""The SQLite file that chats are saved in: its tables, how it is opened, and what happens to a damaged one.

Owns the file and its versions; must not know what the rows mean. A commit is on the disk (WAL, synchronous=FULL)
before it returns, so that neither a killed process nor a power failure takes it back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.chat.store.locks import Locks, NoLocks
from llmrun.errors import DiskFullError, LlmrunError, UsageError
from llmrun.storage import migrate
from llmrun.storage import version as version_of

if TYPE_CHECKING:
    import sqlite3

FILE = "sessions.db"
_BUSY_SECONDS = 5.0
_COMPANIONS = ("", "-wal", "-shm")

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
)


@dataclass(frozen=True, slots=True)
class Opened:
    """A file that is ready.

    Attributes:
        connection: in autocommit mode; see writing().
        locks: who has which chat open.
        note: what has to be told about the opening, "" for nothing.
    """

    connection: sqlite3.Connection
    locks: Locks
    note: str


def open_file(folder: Path) -> Opened:
    """Open the saved chats, making or migrating the file where needed.

    A damaged file is moved aside, never deleted.

    Args:
        folder: is made, and kept for its owner alone.

    Raises:
        UsageError: the file is of a newer llmrun.
        LlmrunError: it can't be read or written.
    """
    path = folder / FILE
    try:
        _own_folder(folder)
        locks = Locks(folder / "sessions.lock")
        if not path.exists():
            _make_file(path)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    note = ""
    with explained(path):
        connection = _ready(path)
        if connection is None:
            with locks.setup():
                connection, note = _set_up(path)
    return Opened(connection, locks, note)


def open_memory() -> Opened:
    """A store of its own in memory; nothing of it is ever on a disk."""
    return Opened(_opened(Path(":memory:")), NoLocks(), "")


@contextmanager
def writing(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """A transaction: on the disk when the block has ended, and undone if it fails.

    Raises:
        DiskFullError: the disk is full.
        LlmrunError: the file can't be written.
    """
    with explained(path):
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Errors of SQLite inside become ours.

    Raises:
        LlmrunError: says which file, why, and what to do.
    """
    import sqlite3

    try:
        yield
    except sqlite3.Error as error:
        raise _in_words(path, error) from error


def _ready(path: Path) -> sqlite3.Connection | None:
    """A connection if the file is as it should be; the fast way that nearly every start takes."""
    import sqlite3

    try:
        return _open(path, may_change=False)
    except sqlite3.Error as error:
        if is_damage(error):
            return None
        raise


def _set_up(path: Path) -> tuple[sqlite3.Connection, str]:
    """Make, migrate or replace the file, and what has to be told about it. Others wait, or have just done it."""
    import sqlite3

    try:
        return _opened(path), ""
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
    aside = _move_aside(path)
    _make_file(path)
    return _opened(path), f"The saved chats were damaged. They are kept as {aside}; new ones begin."


def _opened(path: Path) -> sqlite3.Connection:
    connection = _open(path, may_change=True)
    assert connection is not None, "it was migrated"
    return connection


def _open(path: Path, *, may_change: bool) -> sqlite3.Connection | None:
    """A connection; None if the file is of an older version and is to stay so.

    Raises:
        UsageError: the file is of a newer llmrun.
        sqlite3.Error: it can't be opened, or is damaged.
    """
    import sqlite3

    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
    try:
        # What is deleted is overwritten; macOS's disks need to be told twice to write.
        for pragma in ("synchronous=FULL", "fullfsync=1", "foreign_keys=ON", "secure_delete=ON"):
            connection.execute(f"PRAGMA {pragma}")
        version = version_of(connection)
        if version > len(MIGRATIONS):
            raise UsageError(
                f"the saved chats in {str(path)!r} are of a newer llmrun",
                why=f"their version is {version}, this llmrun knows {len(MIGRATIONS)}",
                hint="pip install --upgrade llmrun, or set LLMRUN_HOME to another folder",
            )
        if version < len(MIGRATIONS):
            if not may_change:
                connection.close()
                return None
            migrate(connection, MIGRATIONS)
        # Reads the newest parts of the file, which shows most damage.
        connection.execute("SELECT max(id) FROM messages").fetchone()
        connection.execute("SELECT name FROM sessions ORDER BY id DESC LIMIT 1").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def is_damage(error: BaseException) -> bool:
    """Whether SQLite found the file itself to be wrong: "not a database" or "malformed"."""
    import sqlite3

    # All other troubles, such as a full disk or a lock, are of a subclass. A table may have gone with a page.
    return type(error) is sqlite3.DatabaseError or "no such table" in str(error)


def _in_words(path: Path, error: sqlite3.Error) -> LlmrunError:
    text = str(error)
    if "disk is full" in text:
        return DiskFullError(f"the chat can't be saved in {str(path)!r}", why="the disk is full")
    if "locked" in text:
        return UsageError("the saved chats are busy", why="another llmrun is writing to them", hint="try again")
    if is_damage(error):
        return LlmrunError(f"the saved chats in {str(path)!r} are damaged", why=text, hint=f"mv {path} {path}.damaged")
    return _unreadable(path, text)


def _unreadable(path: Path, why: str) -> LlmrunError:
    return LlmrunError(
        f"the saved chats in {str(path)!r} can't be read or written",
        why=why,
        hint="check the rights to that folder, or set LLMRUN_HOME to another one",
    )


def _move_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.stem}.damaged-{stamp}{path.suffix}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.stem}.damaged-{stamp}-{number}{path.suffix}")
    for companion in _COMPANIONS:
        with suppress(FileNotFoundError):
            Path(f"{path}{companion}").rename(f"{aside}{companion}")
    return aside


def _own_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.name != "nt" and folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def _make_file(path: Path) -> None:
    """An empty file that only its owner can read; what SQLite puts beside it gets the same rights."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """The name of a new file is on the disk, too."""
    with suppress(OSError):  # not everywhere can a folder be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

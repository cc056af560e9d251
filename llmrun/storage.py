"""Brings an SQLite file's tables up to date, in one transaction, whoever else opens it at the same time.

Owns how a file knows its version; must not know what the tables are for. Migration number n, counted from 1, makes
version n of version n - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3


def version(connection: sqlite3.Connection) -> int:
    """How many migrations a file has had."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection, migrations: Sequence[Sequence[str]]) -> None:
    """Apply those that are missing, all or none.

    Args:
        connection: in autocommit mode.
        migrations: the statements of each.
    """
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statements in migrations[version(connection) :]:  # another process may have done it while we waited
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version={len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise

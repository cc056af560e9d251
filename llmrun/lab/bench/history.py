"""The history of bench results on this disk: keep, list, find, remove.

Results are stored whole, as the JSON of `-o json`, with raw samples and machine. Nothing leaves this disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from llmrun.config import Settings
from llmrun.errors import ResourceError, UsageError, did_you_mean
from llmrun.lab.bench.results import Result
from llmrun.protocol.codec import load_json
from llmrun.storage import Database, SqliteSchema

FILE = "bench.db"
LAST = "last"

# Entry n migrates a file of version n to version n + 1. Never change an entry; add new ones.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE results(
            id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, machine TEXT NOT NULL COLLATE NOCASE,
            models TEXT NOT NULL, version TEXT NOT NULL, tests TEXT NOT NULL, origin TEXT NOT NULL,
            data TEXT NOT NULL)""",
        "CREATE INDEX results_by_machine ON results(machine)",
    ),
)
SCHEMA = SqliteSchema("the bench history", MIGRATIONS, probes=("SELECT max(id) FROM results",))
_COLUMNS = "id, time, machine, models, version, tests"


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """A stored result, without its rows."""

    number: int  # unique; never reused
    time: float  # of the measurement, seconds since 1970
    machine: str  # its name
    models: tuple[str, ...]  # their names
    version: str  # of the program, e.g. "0.1.0"
    tests: str  # e.g. "pp512, tg128"


class History:
    """An open history; use it as a context manager or call close().

    Args:
        settings: with the folder.
        clock: seconds since 1970.

    Attributes:
        note: a message for the user about the opening, "" for none.

    Raises:
        UsageError: the file is from a newer llmrun.
        ResourceError: it can't be read or written.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._database = Database(settings.state_dir / FILE, SCHEMA)
        self._connection, self.note = self._database.connection, self._database.note
        self._clock = clock

    def add(self, result: Result) -> HistoryEntry:
        """Store a result."""
        models = list(dict.fromkeys(row.model or row.model_type for row in result.rows))
        versions = dict.fromkeys(row.version for row in result.rows)
        tests = dict.fromkeys(row.test for row in result.rows)
        values = (
            self._measured(result),
            result.machine.name,
            json.dumps(models),
            ", ".join(versions),
            ", ".join(tests),
            json.dumps(result.to_json()),
        )
        with self._database.explained():
            cursor = self._connection.execute(
                # Nothing has an origin: all results are measured here.
                "INSERT INTO results(time, machine, models, version, tests, origin, data) VALUES (?,?,?,?,?,'',?)",
                values,
            )
        return self.find(str(cursor.lastrowid))

    def all(self, *, machine: str = "", model: str = "", version: str = "") -> list[HistoryEntry]:
        """Return the stored entries, the newest first.

        Args:
            machine: only entries of this machine.
            model: only entries with this model, or with one whose name begins so.
            version: only entries of this version.
        """
        with self._database.explained():
            rows = self._connection.execute(f"SELECT {_COLUMNS} FROM results ORDER BY time DESC, id DESC").fetchall()  # noqa: S608 - a constant
        entries = [_entry(row) for row in rows]
        return [
            entry
            for entry in entries
            if machine.lower() in {"", entry.machine.lower()}
            and version in {"", *entry.version.split(", ")}
            and (not model or any(_is_model(name, model) for name in entry.models))
        ]

    def find(self, which: str) -> HistoryEntry:
        """Return an entry by number, or "last": the newest.

        Raises:
            UsageError: there is none.
        """
        entries = self.all()
        if which == LAST and entries:
            return entries[0]
        chosen = next((entry for entry in entries if str(entry.number) == which), None)
        if chosen is None:
            raise _no_such(which, entries)
        return chosen

    def select(self, which: str) -> list[HistoryEntry]:
        """Return entries by number, "last", or, the newest first, by machine, version, or model.

        Raises:
            UsageError: there is none.
        """
        entries = self.all()
        if which == LAST or which.isdecimal():
            return [self.find(which)]
        for matching in (self.all(machine=which), self.all(version=which), self.all(model=which)):
            if which and matching:
                return matching
        raise _no_such(which, entries)

    def result(self, entry: HistoryEntry) -> Result:
        """Return the whole result of an entry.

        Raises:
            LlmrunError: the result was removed meanwhile, or is damaged.
        """
        with self._database.explained():
            row = self._connection.execute("SELECT data FROM results WHERE id = ?", (entry.number,)).fetchone()
        if row is None:
            raise _no_such(str(entry.number), self.all())
        try:
            return Result.from_json(load_json(row[0]))
        except ValueError as error:
            raise ResourceError(f"result {entry.number} of the history is damaged", why=str(error)) from None

    def remove(self, which: str) -> HistoryEntry:
        """Remove one result.

        Raises:
            UsageError: there is none.
        """
        entry = self.find(which)
        with self._database.explained():
            self._connection.execute("DELETE FROM results WHERE id = ?", (entry.number,))
        return entry

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _measured(self, result: Result) -> float:
        """Return the time of the first row that has one; now if none has."""
        for row in result.rows:
            with suppress(ValueError):
                # Python 3.10 does not know the Z.
                return datetime.fromisoformat(row.test_time.replace("Z", "+00:00")).timestamp()
        return self._clock()


def _entry(row: Sequence[Any]) -> HistoryEntry:
    """Return an entry, without names of models where they are damaged."""
    number, measured, machine, written, version, tests = row
    models: tuple[str, ...] = ()
    with suppress(ValueError, TypeError):
        models = tuple(map(str, load_json(written, has_paths=True)))
    return HistoryEntry(number, measured, machine, models, version, tests)


def _is_model(name: str, text: str) -> bool:
    """Return whether a user may mean this name: the name itself, its beginning, or its file's name."""
    name, text = name.lower(), text.lower()
    return name.startswith(text) or name.rpartition("/")[2].startswith(text)


def _no_such(which: str, entries: Sequence[HistoryEntry]) -> UsageError:
    if not entries:
        return UsageError("there is no earlier bench result", hint="llmrun bench MODEL makes one")
    names = {name for entry in entries for name in (entry.machine, *entry.version.split(", "), *entry.models) if name}
    numbers = f"numbers are {min(e.number for e in entries)} to {max(e.number for e in entries)}"
    return UsageError(
        f"there is no file and no earlier bench result {which!r}",
        why=f"{numbers}; {LAST!r}, a machine, a version or a model will do as well",
        hint=did_you_mean(which, names, "llmrun bench history shows all"),
    )

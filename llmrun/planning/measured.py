"""The file of everything that was measured on this machine: entries, each with what it is a measurement of as its key.

Every answer waits for this, so it imports nothing heavy. Must not know what is measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmrun.config import FORMER_FILES, FORMER_TUNE, FORMER_VARIANTS, LOADS_OTHERWISE, MEASURED_FILE
from llmrun.protocol.codec import load_json
from llmrun.storage import alone_in, disk_errors, write_whole

_SCHEMA = 1
_MOST_BYTES = 1 << 20
_MOST_ENTRIES = 200


def measured(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a kind, the latest first.

    Args:
        kind: what was measured, such as "attention".
        folder: config.Settings.state_dir.
    """
    return [entry for entry in _entries(folder) if _kind(entry) == kind]


def find_measured(kind: str, key: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return what was measured; None if it was not.

    Args:
        key: what it holds for, such as measurements.machine_key().
    """
    return next((entry for entry in _entries(folder) if entry["key"] == {"kind": kind, **key}), None)


def keep_measured(
    kind: str, key: dict[str, Any], folder: Path, entry: dict[str, Any], *, loads_otherwise: bool = False
) -> None:
    """Store what was measured, instead of an entry of the same key; arguments as of find_measured().

    Args:
        loads_otherwise: a model's weights may be loaded in another way because of it. Every start looks for that.

    Raises:
        LlmrunError: the folder can't be written.
    """
    whole_key, marks = {"kind": kind, **key}, {LOADS_OTHERWISE: True} if loads_otherwise else {}
    with _writing(folder):
        others = [each for each in _entries(folder) if each["key"] != whole_key]
        _write(folder, [{"key": whole_key, **entry, **marks}, *others][:_MOST_ENTRIES])


def drop_measured(kind: str, key: dict[str, Any], folder: Path) -> bool:
    """Remove what was measured, and return whether there was something. Raises as keep_measured()."""
    if find_measured(kind, key, folder) is None:
        return False
    with _writing(folder):
        _write(folder, [entry for entry in _entries(folder) if entry["key"] != {"kind": kind, **key}])
    return True


def _entries(folder: Path) -> list[dict[str, Any]]:
    """Return all entries. What `llmrun tune` found was in a file of its own once, and a mark beside this one."""
    entries = _read(folder / MEASURED_FILE)
    if (folder / FORMER_VARIANTS).exists():
        entries = [entry | {LOADS_OTHERWISE: True} if _kind(entry) == "variants" else entry for entry in entries]
    tuned = [entry | {"key": {"kind": "tune", **entry["key"]}} for entry in _read(folder / FORMER_TUNE)]
    return [*entries, *(entry | {LOADS_OTHERWISE: True} for entry in tuned)]


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file; none if it is missing, damaged or of another version."""
    try:
        with path.open("rb") as file:
            return _parsed(file.read(_MOST_BYTES))
    except OSError:
        return []


@lru_cache(maxsize=1)  # a start asks for several kinds
def _parsed(content: bytes) -> list[dict[str, Any]]:
    try:
        data = load_json(content)
        if data["schema"] != _SCHEMA:
            return []
        return [entry for entry in data["entries"] if isinstance(entry, dict) and isinstance(entry.get("key"), dict)]
    except (ValueError, TypeError, KeyError):
        return []


def _kind(entry: dict[str, Any]) -> object:
    return entry["key"].get("kind")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Keep other threads and processes from changing the file after it was read here."""
    with disk_errors(folder / MEASURED_FILE):
        folder.mkdir(parents=True, exist_ok=True)
        with alone_in(folder):
            yield


def _write(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Write the entries; remove the file if there are none."""
    if entries:
        write_whole(folder / MEASURED_FILE, json.dumps({"schema": _SCHEMA, "entries": entries}))
    else:
        (folder / MEASURED_FILE).unlink(missing_ok=True)
    for name in FORMER_FILES:
        (folder / name).unlink(missing_ok=True)

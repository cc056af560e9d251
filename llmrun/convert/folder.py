"""Bounded reader of the small files of a Hugging Face folder: JSON and text.

Must not know their meaning. A folder is untrusted: sizes are checked before reading, and errors name the file.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any, BinaryIO

from llmrun.errors import BadModelError, ModelNotFoundError, UsageError
from llmrun.protocol.codec import load_json

MAX_JSON_BYTES = 256 * 1024 * 1024  # the tokenizer.json of a vocabulary of 262,144 tokens has 33 MB
MAX_TEXT_BYTES = 4 * 1024 * 1024

Json = dict[str, Any]


class Folder:
    """Folder with a model. Raises ModelNotFoundError if it does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_file():
            raise UsageError(f"{str(path)!r} is a file", why="a model's folder is required", hint="name its folder")
        if not path.is_dir():
            raise ModelNotFoundError(f"there is no folder {str(path)!r}", hint="name a folder with a config.json")

    def has(self, name: str) -> bool:
        return is_file(self.path / name)

    def names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self.path.iterdir())
        except OSError as error:
            raise ModelNotFoundError(f"can't read {str(self.path)!r}", why=error.strerror or str(error)) from error

    def json(self, name: str) -> Json:
        """Return the object in a JSON file; empty if there is no such file."""
        return parse_object(self.bytes(name, MAX_JSON_BYTES), str(self.path / name)) if self.has(name) else {}

    def text(self, name: str) -> str:
        """Return the text of a file; empty if there is no such file."""
        return self.bytes(name, MAX_TEXT_BYTES).decode("utf-8", "replace") if self.has(name) else ""

    def bytes(self, name: str, limit: int) -> bytes:
        """Return the content of a file of at most `limit` bytes."""
        path = self.path / name
        with open_regular(path) as file:
            size = file.seek(0, 2)  # a raw file allocates the size passed to read()
            file.seek(0)
            data = file.read(min(size, limit) + 1)
        if len(data) > limit:
            raise BadModelError(f"{str(path)!r} is too large", why=f"it has more than {limit:,} bytes")
        return data


def is_file(path: Path) -> bool:
    """Return whether a file exists; False for an impossible name: too long, or with a null byte."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, unbuffered. Other kinds are refused before opening: a FIFO would hang."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelNotFoundError(f"{str(path)!r} is not a regular file")
        return path.open("rb", buffering=0)
    except OSError as error:
        raise ModelNotFoundError(f"can't read {str(path)!r}", why=error.strerror or str(error)) from error


def parse_object(data: bytes, shown: str) -> Json:
    """Parse a JSON object; repeated names are refused. `shown` is its name in messages."""
    try:
        found = load_json(data, object_pairs_hook=_object)
    except ValueError as error:
        raise _damaged(shown, str(error)) from None
    if not isinstance(found, dict):
        raise _damaged(shown, "it holds no JSON object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1) if len(names) < 1000 else "a name"
        raise ValueError(f"{repeated!r} appears twice")
    return found


def _damaged(shown: str, why: str) -> BadModelError:
    return BadModelError(f"{shown!r} is damaged", why=why, hint="download it again")

"""Files and settings of an untrusted Hugging Face folder, each checked for size and type before it is used."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

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
        parsed = load_json(data, object_pairs_hook=_object)
    except ValueError as error:
        raise _damaged(shown, str(error)) from None
    if not isinstance(parsed, dict):
        raise _damaged(shown, "it holds no JSON object")
    return parsed


def _object(pairs: list[tuple[str, Any]]) -> Json:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1) if len(names) < 1000 else "a name"
        raise ValueError(f"{repeated!r} appears twice")
    return values


def _damaged(shown: str, why: str) -> BadModelError:
    return BadModelError(f"{shown!r} is damaged", why=why, hint="download it again")


MAX_NUMBER = 3.4028234663852886e38  # of float32, GGUF's type for these numbers


class Config:
    """Settings of a model's text part. A null value counts as missing.

    Args:
        values: the object in config.json.
        defaults: the architecture's values of missing settings.

    Raises (all methods):
        BadModelError: the setting has another type, is out of range, or is missing without a default.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._defaults = defaults or {}

    def has(self, name: str) -> bool:
        return name in self._values or name in self._defaults

    def get(self, name: str) -> Any:
        return self._values.get(name, self._defaults.get(name))

    def part(self, name: str) -> dict[str, Any]:
        """Return a setting that is an object; empty if missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            self.fail(name, "an object")
        return value or {}

    def count(self, name: str, limit: int) -> int:
        """Return an integer from 1 to `limit`, a bound set by the tensors or by llama.cpp."""
        value = self.get(name)
        if type(value) is not int or not 0 < value <= limit:
            self.fail(name, f"a whole number from 1 to {limit:,}")
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean; False if missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.fail(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        """Return a string; empty if missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            self.fail(name, "a string")
        return value or ""

    def number(self, name: str, minimum: float = -MAX_NUMBER, maximum: float = MAX_NUMBER) -> float:
        """Return a finite number from `minimum` to `maximum`."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            is_bounded = (minimum, maximum) != (-MAX_NUMBER, MAX_NUMBER)
            self.fail(name, f"a number from {minimum:g} to {maximum:g}" if is_bounded else "a number")
        return float(value)

    def fail(self, name: str, required: str) -> NoReturn:
        value = self.get(name)
        why = f"{name} is missing" if value is None else f"{name} is {str(value)[:80]!r}; it must be {required}"
        raise BadModelError("config.json does not describe the model", why=why)

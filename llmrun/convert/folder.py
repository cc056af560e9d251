"""The small files of a Hugging Face folder: JSON and text, read with bounds.

Must not know what they mean. A folder is untrusted: sizes are checked before reading, names can't lead out of it, and
what is not a JSON object is refused with the file's name.
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
    """A folder with a model in it.

    Raises:
        ModelNotFoundError: there is no such folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_file():
            raise UsageError(
                f"{str(path)!r} is a file", why="a model's folder is needed", hint="name the folder that it is in"
            )
        if not path.is_dir():
            raise ModelNotFoundError(f"there is no folder {str(path)!r}", hint="name a folder with a config.json")

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return is_file(self.path / name)

    def names(self) -> list[str]:
        """What is in the folder, in alphabetical order."""
        try:
            return sorted(entry.name for entry in self.path.iterdir())
        except OSError as error:
            raise ModelNotFoundError(f"can't read {str(self.path)!r}", why=error.strerror or str(error)) from error

    def json(self, name: str) -> Json:
        """The object in a JSON file; empty when there is no such file.

        Raises:
            BadModelError: it is not a JSON object, or larger than any real one.
        """
        return parse_object(self.bytes(name, MAX_JSON_BYTES), str(self.path / name)) if self.has(name) else {}

    def text(self, name: str) -> str:
        """A text file; empty when there is no such file."""
        return self.bytes(name, MAX_TEXT_BYTES).decode("utf-8", "replace") if self.has(name) else ""

    def bytes(self, name: str, most: int) -> bytes:
        """A whole file.

        Raises:
            BadModelError: it is larger than `most` bytes.
            ModelNotFoundError: it can't be read.
        """
        path = self.path / name
        with open_regular(path) as file:
            size = file.seek(0, 2)  # a raw file allocates as much as it is asked for
            file.seek(0)
            data = file.read(min(size, most) + 1)
        if len(data) > most:
            raise BadModelError(f"{str(path)!r} is too large", why=f"it has more than {most:,} bytes")
        return data


def is_file(path: Path) -> bool:
    """Whether there is a file; False for a name that no file can have: too long, or with a zero byte."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, unbuffered. Anything else is refused before it is opened: a FIFO would hang.

    Raises:
        ModelNotFoundError: there is none, or it can't be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelNotFoundError(f"{str(path)!r} is not a regular file")
        return path.open("rb", buffering=0)
    except OSError as error:
        raise ModelNotFoundError(f"can't read {str(path)!r}", why=error.strerror or str(error)) from error


def parse_object(data: bytes, shown: str) -> Json:
    """JSON text that is one object, without names that stand in it twice.

    Args:
        shown: what messages call it.

    Raises:
        BadModelError: it is something else.
    """
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
        twice = next(name for name in names if names.count(name) > 1) if len(names) < 1000 else "a name"
        raise ValueError(f"{twice!r} is there twice")
    return found


def _damaged(shown: str, why: str) -> BadModelError:
    return BadModelError(f"{shown!r} is damaged", why=why, hint="download it again")

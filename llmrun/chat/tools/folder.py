"""Ready-made tools that list and read the files below one folder, and nothing beyond it."""

from __future__ import annotations

import os
from pathlib import Path

from llmrun.chat.attachments import read_text

_MOST_ENTRIES = 500
_MAX_CHARACTERS = 9_000  # of one result


class Folder:
    """The tools of one folder. Where a link leads outside, it is refused."""

    def __init__(self, path: str) -> None:
        self._root = os.path.realpath(path)

    def read_file(self, path: str, line: int = 1) -> str:
        """Read a file of the user's folder: text, code, PDF, Word or HTML.

        Args:
            path: within the folder, as list_files shows it
            line: the first line to read, to read on in a long file
        """
        found = self._inside(path)
        if not found.is_file():
            raise FileNotFoundError(f"{path} is {'a folder' if found.is_dir() else 'not a file'}")
        lines = read_text(str(found)).text.splitlines(keepends=True)
        end, size = max(0, line - 1), 0
        while end < len(lines) and (not size or size + len(lines[end]) <= _MAX_CHARACTERS):
            size += len(lines[end])
            end += 1
        text = "".join(lines[max(0, line - 1) : end])
        return text if end == len(lines) else f"{text}[{len(lines) - end:,} more lines; line={end + 1} reads on]"

    def list_files(self, folder: str = ".", recursive: bool = False) -> str:
        """List the files of the user's folder, with their sizes.

        Args:
            folder: a folder within it
            recursive: also the files of all folders below
        """
        found = self._inside(folder)
        if not found.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder")
        lines = []
        for place, names, files in os.walk(found):
            names.sort()
            below = os.path.relpath(place, self._root)
            for name in sorted([*(f"{each}{os.sep}" for each in names), *files]):
                lines.append(self._line(Path(place, name), os.path.normpath(Path(below, name))))
                if len(lines) > _MOST_ENTRIES:
                    return "\n".join([*lines[:-1], f"[and more than {_MOST_ENTRIES} entries]"])
            if not recursive:
                break
        return "\n".join(lines) or "[it is empty]"

    def _line(self, path: Path, shown: str) -> str:
        if not self._holds(os.path.realpath(path)):
            return f"{shown}  [a link that leads outside]"
        if path.is_dir():
            return f"{shown}{os.sep}"
        return f"{shown}  {path.stat().st_size:,} bytes" if path.is_file() else f"{shown}  [not a file]"

    def _inside(self, path: str) -> Path:
        """Return a path below the folder, after its links. Raises PermissionError for one that leads outside."""
        found = os.path.realpath(os.path.join(self._root, path))  # noqa: PTH118 - an absolute path stays one
        if not self._holds(found):
            raise PermissionError(f"{path} is outside of the folder")
        return Path(found)

    def _holds(self, path: str) -> bool:
        return path == self._root or path.startswith(os.path.join(self._root, ""))  # noqa: PTH118 - ends with a slash

"""The file of a batch's answers: a line for each row, written as it comes, never lost and never twice.

Owns the file and what it says is done; must not know how answers are made. It is only ever appended to. Lines are
synced in groups; what a kill or a full disk cut in the middle is cut off when the batch goes on, and asked again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from llmrun.errors import UsageError
from llmrun.protocol.codec import load_json
from llmrun.storage import disk_errors, lock_file, sync_folder

_SYNC_SECONDS = 1.0
_SYNC_LINES = 64


class RowWritten(NamedTuple):
    """A row that has its line: the key of what was asked, and whether it failed."""

    key: str
    failed: bool


class ResultFile:
    """Answers on the disk. One process has it at a time.

    Args:
        path: made where it is missing.
        clock: seconds, monotonic.

    Attributes:
        written: number of each row that has its line -> what that says.

    Raises:
        UsageError: it holds something else, or another process writes it.
        ResourceError: it can't be opened.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self.written: dict[int, RowWritten] = {}
        with disk_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with disk_errors(path):
                if not lock_file(self._descriptor):
                    raise UsageError(
                        f"another batch writes {str(path)!r}", hint="wait for it, or name another file with -o"
                    )
                sync_folder(path.absolute().parent)
            self._end = self._read()
            with disk_errors(path):
                os.ftruncate(self._descriptor, self._end)
                os.lseek(self._descriptor, self._end, os.SEEK_SET)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._synced_at, self._unsynced = clock(), 0

    def _read(self) -> int:
        """Take up what is done; where the last whole line ends."""
        end = 0
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                self._take(number, line)
                end += len(line)
        return end

    def _take(self, number: int, line: bytes) -> None:
        try:
            found = load_json(line)
            row, key, error = found["row"], found["key"], found["error"]
        except (ValueError, TypeError, KeyError):
            raise UsageError(
                f"{str(self._path)!r} is not a batch's file of answers",
                why=f"line {number} is something else",
                hint="name another file with -o",
            ) from None
        self.written[row] = RowWritten(key, error is not None)

    def add(self, row: int, key: str, result: Mapping[str, Any]) -> None:
        """Write a row's line.

        Args:
            result: with "error", None where it did not fail.

        Raises:
            DiskFullError: there is no room; what was half written is gone.
            ResourceError: it can't be written.
        """
        line = json.dumps({"row": row, **result, "key": key}, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with disk_errors(self._path, lambda: len(line)):
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._end)
                    os.lseek(self._descriptor, self._end, os.SEEK_SET)
                raise
        self._end += len(line)
        self.written[row] = RowWritten(key, result["error"] is not None)
        self._unsynced += 1
        if self._unsynced >= _SYNC_LINES or self._clock() - self._synced_at >= _SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        with disk_errors(self._path):
            os.fsync(self._descriptor)
        self._synced_at, self._unsynced = self._clock(), 0

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._unsynced:
                self._sync()
        finally:
            os.close(self._descriptor)

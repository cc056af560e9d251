"""The file of a batch's answers: one line per row, appended when it is finished, never lost and never twice.

Must not know how answers are computed. Until the first row is written the file is only read; it is rewritten once if
errors are retried. Lines are synced in groups. A line that was cut by a kill or a full disk is removed when the batch
continues, and its row is answered again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llmrun.errors import ResourceError, UsageError
from llmrun.protocol.codec import load_json
from llmrun.storage import arriving, check_target, disk_errors, require_regular, sync_folder
from llmrun.system import lock

_SYNC_SECONDS = 1.0
_SYNC_LINES = 64
_HEAD = 64  # bytes of a line that are read to see if it is an object
_BINARY = getattr(os, "O_BINARY", 0)
_BEGINNING = b'{"row": '
_SECOND_NAMES = tuple(f', "{name}": '.encode() for name in ("id", "custom_id", "answer"))  # see answers.result_of()


class WrittenRow(NamedTuple):
    """The line of a row."""

    key: str  # of its request
    failed: bool


class ResultFile:
    """The file of answers, locked by one process at a time.

    Args:
        path: created by require_writable() or the first row if it is missing; removed if it stays empty.
        clock: monotonic seconds.
        retry_errors: rows with an error count as unwritten; their lines are removed when the first new one is written.

    Raises:
        UsageError: it is another file, is not a regular file, or another process writes it.
        ResourceError: it can't be opened.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic, *, retry_errors: bool = False) -> None:
        self._path, self._clock = path, clock
        self.written: dict[int, WrittenRow] = {}  # by number of the row
        self._end = self._size = 0  # of the whole lines, and of the file when it was read
        self._reading: int | None = None  # descriptor with the lock, until the first row is written
        self._descriptor: int | None = None
        require_regular(path)
        try:
            with disk_errors(path), suppress(FileNotFoundError):
                self._reading = os.open(path, os.O_RDONLY | _BINARY)
            if self._reading is not None:
                self._lock(self._reading)
                self._end = self._read(self._reading)
                self._size = os.fstat(self._reading).st_size
        except BaseException:
            self._close()
            raise
        self._retried = {row for row, line in self.written.items() if line.failed and retry_errors}
        for row in self._retried:
            del self.written[row]
        self._synced_at, self._unsynced = clock(), 0

    @property
    def n_failed(self) -> int:
        return sum(line.failed for line in self.written.values())

    def require_writable(self) -> None:
        """Check that rows can be written, before the work begins; a new file is made, and locked.

        Raises:
            UsageError: the folder is missing, or another process has begun to write the file.
            ResourceError: the file or its folder can't be written.
        """
        if self._reading is None or self._retried:
            check_target(Path(os.path.realpath(self._path)))
            if self._reading is None:
                self._descriptor = self._open()
        elif not os.access(self._path, os.W_OK):
            raise ResourceError(f"can't write {str(self._path)!r}", why="the file is read-only")

    def _lock(self, descriptor: int) -> None:
        if lock(descriptor) is False:
            raise UsageError(
                f"another batch writes {str(self._path)!r}", hint="wait for it, or choose another file with -o"
            )

    def _read(self, descriptor: int) -> int:
        """Read the lines; return the end of the last complete line."""
        end = number = 0
        with os.fdopen(os.dup(descriptor), "rb") as file:
            while line := self._line(file):
                number += 1
                try:
                    if not line.endswith(b"\n"):
                        _require_beginning(line, follows=number > 1)
                        break
                    row, written = _parsed(line)
                except ValueError:
                    raise UsageError(
                        f"{str(self._path)!r} is not a batch's file of answers",
                        why=f"line {number} is something else",
                        hint="choose another file with -o",
                    ) from None
                self.written[row] = written
                end += len(line)
        return end

    def _line(self, file: BinaryIO) -> bytes:
        """Return the next line, or the head of a line of something else, which may have no end."""
        head = file.readline(_HEAD)
        is_ours = head.startswith(b"{") or (head.startswith(b"\0") and self.written)
        return head + file.readline() if is_ours and not head.endswith(b"\n") else head

    def _open(self) -> int:
        """Open the file for the first row. Drop the half-written line and the lines of rows to retry."""
        if self._retried:
            self._remove_retried()
        is_new = self._reading is None
        with disk_errors(self._path):
            descriptor = os.open(self._path, os.O_RDWR | _BINARY | (os.O_CREAT if is_new else 0), 0o666)
            try:
                if self._reading is None:
                    self._lock(descriptor)
                found = os.fstat(descriptor)
                is_same = self._reading is None or os.path.samestat(found, os.fstat(self._reading))
                if not is_same or found.st_size != self._size:
                    raise UsageError(f"another program changed {str(self._path)!r}", hint="run the same command again")
                os.ftruncate(descriptor, self._end)
                os.lseek(descriptor, self._end, os.SEEK_SET)
            except BaseException:
                os.close(descriptor)
                raise
        if is_new:
            sync_folder(self._path.absolute().parent)
        return descriptor

    def _remove_retried(self) -> None:
        """Replace the file by one without the lines of rows to retry. The lock goes with the old one."""
        assert self._reading is not None
        with arriving(self._path) as path, path.open("wb") as new, self._path.open("rb") as old:
            while old.tell() < self._end:
                line = old.readline()
                if _parsed(line)[0] not in self._retried:
                    new.write(line)
            self._size = new.tell()
        self._end = self._size
        os.close(self._reading)
        self._reading = None
        self._retried = set()

    def add(self, row: int, key: str, result: Mapping[str, Any]) -> None:
        """Write a row's line.

        Args:
            result: has "error", None unless the row failed.

        Raises:
            DiskFullError: the disk is full; the incomplete line was removed.
            ResourceError: it can't be written.
            UsageError: another program changed or locked the file.
        """
        if self._descriptor is None:
            self._descriptor = self._open()
        descriptor = self._descriptor
        line = json.dumps({"row": row, **result, "key": key}, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with disk_errors(self._path, lambda: len(line)):
            try:
                written = 0
                while written < len(line):
                    written += os.write(descriptor, line[written:])
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, self._end)
                    os.lseek(descriptor, self._end, os.SEEK_SET)
                raise
        self._end += len(line)
        self.written[row] = WrittenRow(key, result["error"] is not None)
        self._unsynced += 1
        if self._unsynced >= _SYNC_LINES or self._clock() - self._synced_at >= _SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        assert self._descriptor is not None
        with disk_errors(self._path):
            os.fsync(self._descriptor)
        self._synced_at, self._unsynced = self._clock(), 0

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._unsynced:
                self._sync()
        finally:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None and self._reading is None and not self._end:  # a new file without a row
            with suppress(OSError):
                Path(os.path.realpath(self._path)).unlink()
        for descriptor in (self._descriptor, self._reading):
            if descriptor is not None:
                os.close(descriptor)


def _parsed(line: bytes) -> tuple[int, WrittenRow]:
    """Parse a line. Raise ValueError for a line of another file."""
    found = load_json(line)
    try:
        row, key, error = found["row"], found["key"], found["error"]
    except (TypeError, KeyError):
        raise ValueError("not a line of answers") from None
    if type(row) is not int or not isinstance(key, str):
        raise ValueError("not a line of answers")
    return row, WrittenRow(key, error is not None)


def _require_beginning(line: bytes, *, follows: bool) -> None:
    """Raise unless a line without an end is the beginning of an answer's line.

    Args:
        follows: there are complete lines before it. A power loss may leave zeros after these.

    Raises:
        ValueError: it is the beginning of something else.
    """
    line = line.rstrip(b"\0")
    try:
        load_json(line)
    except ValueError:
        found = re.fullmatch(re.escape(_BEGINNING) + rb"\d+(.*)", line, re.DOTALL)
        is_ours = (
            any(name.startswith(found[1]) or found[1].startswith(name) for name in _SECOND_NAMES)
            if found
            else _BEGINNING.startswith(line) and (follows or bool(line))
        )
        if not is_ours:
            raise
    else:
        _parsed(line)  # whole, but for its end

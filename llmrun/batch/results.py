"""The file of a batch's answers: one line per row, appended when it is finished, never lost and never twice.

Until the first row is written the file is only read; it is rewritten once if errors are retried. Lines are synced in
groups. A line that was cut by a kill or a full disk is removed when the batch continues, and its row is answered again.
When every row has an answer, they can be written as a table: the input's columns, then the answer's, in its order."""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llmrun.batch.rows import DELIMITERS, Row, require_pyarrow
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
                status = os.fstat(descriptor)
                is_same = self._reading is None or os.path.samestat(status, os.fstat(self._reading))
                if not is_same or status.st_size != self._size:
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
    parsed = load_json(line)
    try:
        row, key, error = parsed["row"], parsed["key"], parsed["error"]
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
        match = re.fullmatch(re.escape(_BEGINNING) + rb"\d+(.*)", line, re.DOTALL)
        is_ours = (
            any(name.startswith(match[1]) or match[1].startswith(name) for name in _SECOND_NAMES)
            if match
            else _BEGINNING.startswith(line) and (follows or bool(line))
        )
        if not is_ours:
            raise
    else:
        _parsed(line)  # whole, but for its end


LINE_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (*DELIMITERS, ".parquet")
_ANSWER_COLUMNS = ("answer", "thoughts", "finish_reason", "prompt_tokens", "completion_tokens", "response", "error")
_OPTIONAL = {"thoughts", "response"}  # columns that are left out where no row has them
_RENAMED = "llmrun_{}"  # where the input has a column of the same name


class OutputFiles(NamedTuple):
    """The files of the answers."""

    lines: Path  # grows with each answer
    table: Path | None = None  # written from the lines when every row has an answer

    @property
    def shown(self) -> Path:
        return self.table or self.lines


def output_files(out: Path, source: Path) -> OutputFiles:
    """Return the files for `-o`, by its suffix.

    Args:
        source: file of the rows.

    Raises:
        UsageError: no such format, pyarrow is missing for Parquet, or a file is the source or not a batch's.
    """
    require_regular(out)
    suffix = out.suffix.lower()
    files = OutputFiles(out.with_name(f"{out.name}.jsonl"), out) if suffix in TABLE_SUFFIXES else OutputFiles(out)
    for path in filter(None, files):
        if path.exists() and source.exists() and path.samefile(source):
            raise UsageError(f"-o {out} is the file with the rows", hint="name another file")
    if suffix not in (*LINE_SUFFIXES, *TABLE_SUFFIXES):
        *others, last = (".jsonl", *TABLE_SUFFIXES)
        kind = f"{suffix} files" if suffix else "a file without a suffix"
        hint = f"name a file that ends in {', '.join(others)} or {last}"
        raise UsageError(f"batch can't write {kind}: -o {out}", why="the suffix decides the format", hint=hint)
    if suffix == ".parquet":
        require_pyarrow(f"{str(out)!r} can't be written")
    if files.table is None:
        return files
    if out.exists() and not files.lines.exists():
        why = f"it is not this batch's: there is no {files.lines.name} beside it"
        raise UsageError(f"{str(out)!r} exists", why=why, hint="name another file with -o, or move it away")
    check_target(out)
    return files


def write_table(files: OutputFiles, source: Path, rows: Sequence[Row]) -> None:
    """Write the table of all rows.

    Args:
        source: file of the rows. A Parquet table keeps the types of a Parquet file's columns.

    Raises:
        UsageError: the Parquet file of the rows changed meanwhile.
        ResourceError: the table can't be written.
    """
    assert files.table is not None
    answers = _read_answers(files.lines)
    columns = list(dict.fromkeys(name for row in rows for name in row.columns))
    names = [
        name for name in _ANSWER_COLUMNS if name not in _OPTIONAL or any(name in answer for answer in answers.values())
    ]
    cells = {name: [_answer_cell(name, answers[row.number].get(name)) for row in rows] for name in names}
    added = {_RENAMED.format(name) if name in columns else name: values for name, values in cells.items()}
    with arriving(files.table) as path:
        if files.table.suffix.lower() == ".parquet":
            _write_parquet(path, source, rows, columns, added)
        else:
            _write_text(path, DELIMITERS[files.table.suffix.lower()], rows, columns, added)


def _read_answers(lines: Path) -> dict[int, Mapping[str, Any]]:
    """Return the results by number of the row."""
    with lines.open("rb") as file:
        return {answer["row"]: answer for answer in map(load_json, file)}


def _answer_cell(name: str, value: Any) -> Any:
    """Return a field of a result as one value: an error as a sentence."""
    if name == "error" and isinstance(value, dict):
        return ": ".join(filter(None, (value.get("code"), value.get("message"))))
    return _flat(value)


def _flat(value: Any) -> Any:
    """Return a value without structure: lists and objects as JSON."""
    if isinstance(value, (dict, list)):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _text(value: Any) -> str:
    """Return the text of a cell."""
    value = _flat(value)
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str).strip('"')


def _write_text(
    path: Path, delimiter: str, rows: Sequence[Row], columns: Sequence[str], added: Mapping[str, Sequence[Any]]
) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        table.writerow([*columns, *added])
        for index, row in enumerate(rows):
            cells = (_text(row.columns.get(name)) for name in columns)
            table.writerow([*cells, *(_text(values[index]) for values in added.values())])


def _write_parquet(
    path: Path, source: Path, rows: Sequence[Row], columns: Sequence[str], added: Mapping[str, Sequence[Any]]
) -> None:
    import pyarrow
    from pyarrow import parquet

    if source.suffix.lower() == ".parquet":
        table = parquet.read_table(source)
        if table.num_rows != len(rows):
            raise UsageError(f"{str(source)!r} changed while its rows were answered", hint="run the same command again")
    else:
        cells = {name: _column([row.columns.get(name) for row in rows]) for name in columns}
        table = pyarrow.table(cells)
    kinds = {name: pyarrow.int64() if name.endswith("_tokens") else pyarrow.string() for name in added}
    for name, values in added.items():
        table = table.append_column(name, pyarrow.array(values, kinds[name]))
    parquet.write_table(table, path)


def _column(values: Iterable[Any]) -> Any:
    """Return the Arrow array of a column; a column of mixed types is text."""
    import pyarrow

    flat = [_flat(value) for value in values]
    try:
        return pyarrow.array(flat)
    except (pyarrow.ArrowException, OverflowError):
        return pyarrow.array([None if value is None else _text(value) for value in flat])

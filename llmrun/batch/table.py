"""The answers of a batch as a table: the input's columns, then the answer's, in the input's order.

It is written when every row has an answer, from the lines that grew until then (results.py). Must not know engines or
terminals.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmrun.batch.rows import DELIMITERS, Row, require_pyarrow
from llmrun.errors import UsageError
from llmrun.protocol.codec import load_json
from llmrun.storage import arriving, check_target, require_regular

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
        name for name in _ANSWER_COLUMNS if name not in _OPTIONAL or any(name in each for each in answers.values())
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
        return {found["row"]: found for found in map(load_json, file)}


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
            own = (_text(row.columns.get(name)) for name in columns)
            table.writerow([*own, *(_text(values[index]) for values in added.values())])


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
        own = {name: _column([row.columns.get(name) for row in rows]) for name in columns}
        table = pyarrow.table(own)
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

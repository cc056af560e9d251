"""Results as files of llmrun or llama-bench, read and written: Markdown, CSV, JSON, JSON lines.

Files are untrusted: numbers have to be finite and of a size to compute with, and no name in one may end a cell.
llama-bench's fields keep their names, order and meaning; ours follow. Paths are cut to the file's name, because results
are shared.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from llmrun.errors import LlmrunError, UsageError
from llmrun.lab.bench.results import BenchRow, Result
from llmrun.protocol.codec import as_dict, load_json
from llmrun.statistics import interval

_MOST = 2**63  # what SQLite and other programs take for a whole number


def read_file(path: Path) -> Result:
    """Read a result from our json or jsonl, or from llama-bench's `-o json` or `-o jsonl`.

    Raises:
        UsageError: the file is missing, or is not a result.
        LlmrunError: the file is from a newer llmrun, or damaged.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{str(path)!r} can't be read", why=why) from None
    try:
        data = _parsed(text)
    except ValueError:
        raise UsageError(
            f"{str(path)!r} is not a bench result",
            why="it is neither JSON nor JSON lines",
            hint="make one with: llmrun bench MODEL -o json > FILE",
        ) from None
    try:
        result = Result.from_json(data)
        for row in result.rows:
            _check(as_dict(row), "a row")
    except LlmrunError as error:
        raise LlmrunError(f"{str(path)!r}: {error.what}", why=error.why, hint=error.hint) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise LlmrunError(f"{str(path)!r} is not a bench result", why=str(error)) from None
    return result


def _parsed(text: str) -> Any:
    try:
        return load_json(text, parse_constant=_refuse)
    except json.JSONDecodeError:  # one row a line
        return [load_json(line, parse_constant=_refuse) for line in text.splitlines() if line.strip()]


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check(value: Any, what: str) -> None:
    """Check that all numbers can be computed with, and written again.

    Raises:
        ValueError: naming the first other number.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            _check(item, name)
    elif isinstance(value, list):
        for item in value:
            _check(item, what)
    elif isinstance(value, (int, float)) and not (math.isfinite(value) and abs(value) < _MOST):
        raise ValueError(f"{what} is {str(value)[:40]}")


# Columns of our own in CSV.
_OURS: dict[str, Callable[[BenchRow], Any]] = {
    "model": lambda row: row.model,
    "test": lambda row: row.test,
    "program": lambda row: row.program,
    "version": lambda row: row.version,
    "n_threads_batch": lambda row: row.n_threads_batch,
    "repetitions": lambda row: row.repetitions,
    "low_ts": lambda row: _end(row, "low"),
    "high_ts": lambda row: _end(row, "high"),
    "share_of_limit": lambda row: row.share_of_limit,
    "binds": lambda row: row.limit.binds if row.limit else None,
    "load_ns": lambda row: row.load_ns,
    "peak_bytes": lambda row: row.peak_bytes,
    "ttft_ns": lambda row: sum(times) // len(times) if row.chat and (times := row.chat.ttft_ns) else None,
    "token_p50_ns": lambda row: row.chat.token_p50_ns if row.chat else None,
    "token_p95_ns": lambda row: row.chat.token_p95_ns if row.chat else None,
    "token_p99_ns": lambda row: row.chat.token_p99_ns if row.chat else None,
    "sampling_share": lambda row: row.chat.sampling_share if row.chat else None,
    "samples_ns": lambda row: json.dumps(row.samples_ns),
    "warnings": lambda row: row.warning_text,
    "machine": lambda row: row.machine.name if row.machine else None,
}
# llama-bench's columns that are only in its JSON.
_ARRAYS = ("samples_ns", "samples_ts")
_LAST_OF_LLAMA_BENCH = "stddev_ts"

# Settings -> llama-bench's headings in Markdown.
_VARYING = {
    "n_threads": "threads", "n_threads_batch": "tb", "n_batch": "n_batch", "n_ubatch": "n_ubatch", "type_k": "type_k",
    "type_v": "type_v", "n_gpu_layers": "ngl", "flash_attn": "fa", "load_mode": "lm", "repack": "rpk",
}  # fmt: skip
_DEFAULTS = BenchRow()
_TO_THE_LEFT = {"model", "backend", "type_k", "type_v", "lm", "program", "note"}


def write(result: Result, kind: str) -> str:
    """Return a result as text that ends with a newline.

    Args:
        kind: "md", "csv", "json" or "jsonl".

    Raises:
        UsageError: the format is unknown.
    """
    if kind not in WRITERS:
        raise UsageError(f"there is no format {kind!r}", why=f"there are {', '.join(WRITERS)}")
    return WRITERS[kind](tuple(map(without_paths, result.rows)))


def without_paths(row: BenchRow) -> BenchRow:
    """Return a row without folders, which identify the user."""
    is_path = row.model.startswith(("/", "~", ".")) or "\\" in row.model
    return replace(row, model_filename=_file(row.model_filename), model=_file(row.model) if is_path else row.model)


def _file(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]


# ---- CSV -------------------------------------------------------------------------------------------


def _csv(rows: Sequence[BenchRow]) -> str:
    text = io.StringIO()
    names = [name for name in _DEFAULTS.to_json() if name not in _ARRAYS]
    names = names[: names.index(_LAST_OF_LLAMA_BENCH) + 1]
    text.write(",".join([*names, *_OURS]) + "\n")  # llama-bench does not quote these
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for row in rows:
        data, ours = row.to_json(), (value(row) for value in _OURS.values())
        writer.writerow([_cell(value) for value in (*(data[name] for name in names), *ours)])
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Return a CSV cell. An apostrophe before text that begins like a formula keeps spreadsheets from running it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        value = _one_line(value)
        return f"'{value}" if value.startswith(("=", "+", "-", "@")) else value
    return "" if value is None else value


def _end(row: BenchRow, end: str) -> float | None:
    ends = interval(row.samples_ts)
    return getattr(ends, end) if ends else None


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


# ---- Markdown --------------------------------------------------------------------------------------


def _markdown(rows: Sequence[BenchRow]) -> str:
    """Return llama-bench's table, with the mean's 95 % interval, the share of the limit, and warnings."""
    columns: dict[str, Callable[[BenchRow], str]] = {
        "model": _model_namer(rows),
        "size": lambda row: _size(row.model_size),
        "params": lambda row: _parameters(row.model_n_params),
        "backend": lambda row: row.backends,
    }
    for name in _shown_settings(rows):
        columns[_VARYING[name]] = lambda row, name=name: _setting(getattr(row, name))  # type: ignore[misc]
    if len({row.program for row in rows}) > 1:
        columns["program"] = lambda row: row.program
    columns["test"] = lambda row: row.test
    columns["t/s"] = lambda row: f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}"
    columns["95%"] = _interval
    if any(row.share_of_limit for row in rows):
        columns["of limit"] = lambda row: f"{row.share_of_limit:.0%}" if row.share_of_limit else ""
    if any(row.warnings or row.is_partial for row in rows):
        columns["note"] = _note
    cells = [[value(row) for value in columns.values()] for row in rows]
    builds = dict.fromkeys(f"{row.build_commit or 'unknown'}, by {row.program} {row.version}" for row in rows)
    return markdown_table(list(columns), cells, _TO_THE_LEFT) + f"\n\nbuild: {', '.join(builds)}\n"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], to_the_left: Collection[str]) -> str:
    """Return an aligned Markdown table.

    Args:
        rows: unescaped cells.
        to_the_left: headings of left-aligned columns; the others are right-aligned.
    """
    cells = [[escape(text) for text in row] for row in rows]
    widths = [max(len(line[i]) for line in [headings, *cells]) for i in range(len(headings))]
    left = [heading in to_the_left for heading in headings]

    def line(parts: Sequence[str]) -> str:
        padded = (p.ljust(w) if is_left else p.rjust(w) for p, w, is_left in zip(parts, widths, left, strict=True))
        return f"| {' | '.join(padded)} |"

    rules = ["-" * width if is_left else "-" * (width - 1) + ":" for width, is_left in zip(widths, left, strict=True)]
    return "\n".join([line(headings), line(rules), *map(line, cells)])


def escape(text: str) -> str:
    """Return text escaped for a cell of a Markdown table."""
    # A _ within a word is one, as in Q4_K.
    return re.sub(r"([\\`*{}\[\]<>|~&!#]|\b_|_\b|(?<=_)_)", r"\\\1", _one_line(text))


def _model_namer(rows: Sequence[BenchRow]) -> Callable[[BenchRow], str]:
    """Return a function that names a row's model: llama-bench's kind, and the name where two are of one kind."""
    kinds = {row.model: row.model_type for row in rows}
    alike = {kind for kind in kinds.values() if list(kinds.values()).count(kind) > 1}
    return lambda row: f"{row.model_type} {row.model}" if row.model_type in alike else row.model_type or row.model


def _shown_settings(rows: Sequence[BenchRow]) -> list[str]:
    """Return the settings to show: threads always, as llama-bench does on a CPU; others if varied or not default."""
    shown = ["n_threads"]
    for name in list(_VARYING)[1:]:
        values = {getattr(row, name) for row in rows}
        if values - {getattr(_DEFAULTS, name)} and not (name == "load_mode" and values <= {"auto", "mmap"}):
            shown.append(name)
    return shown


def _setting(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.2f} MiB" if n_bytes < 2**30 else f"{n_bytes / 2**30:.2f} GiB"


def _parameters(count: int) -> str:
    return f"{count / 1e6:.2f} M" if count < 1e9 else f"{count / 1e9:.2f} B"


def _interval(row: BenchRow) -> str:
    ends = interval(row.samples_ts)
    return f"{ends.low:.2f} - {ends.high:.2f}" if ends else ""


def _note(row: BenchRow) -> str:
    stopped = [f"stopped after {len(row.samples_ns)} of {row.repetitions}"] if row.is_partial else []
    return "; ".join([*(warning.text for warning in row.warnings), *stopped])


WRITERS: dict[str, Callable[[Sequence[BenchRow]], str]] = {
    "md": _markdown,
    "csv": _csv,
    "json": lambda rows: json.dumps([row.to_json() for row in rows], indent=2, allow_nan=False) + "\n",
    "jsonl": lambda rows: "".join(json.dumps(row.to_json(), allow_nan=False) + "\n" for row in rows),
}

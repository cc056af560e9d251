"""The output of `llmrun bench`: each row once it is measured, a live progress line, details at the end.

Owns columns, words and the live line; must not know how anything is measured. Names in rows are untrusted text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llmrun.bench.cases import Case
from llmrun.bench.results import BenchRow, Limit, Result, setting_text
from llmrun.protocol.settings import SETTINGS, shown
from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.activity import StatusLine
from llmrun.ui.terminal.cells import cut, width
from llmrun.ui.terminal.format import counted, milliseconds, rate_of_bytes, seconds
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, show_record
from llmrun.ui.views.bench_labels import labels

if TYPE_CHECKING:
    from llmrun.bench.run import Progress

_DIM, _BOLD, _YELLOW, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[33m", "\x1b[0m"
_GAP = "  "
_MAX_NAME = 22
_NOTE_WIDTH = 14
_LIMIT = "OF LIMIT"


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    width: int
    cell: Callable[[BenchRow], str]
    right: bool = True


class BenchView:
    """The view of a running bench.

    Args:
        models: names.
        cases: of each model; none if only progress is shown.
        shows_rows: print rows as a table on stdout; else as notes on stderr.
    """

    def __init__(self, output: Output, models: Sequence[str], cases: Sequence[Case], *, shows_rows: bool) -> None:
        self._output = output
        self._columns = _columns(models, cases)
        self._shows_rows = shows_rows
        self._has_heading = False
        self._status = StatusLine(output)
        self._line = ""

    def progress(self, progress: Progress) -> None:
        """Redraw the progress line, on a terminal."""
        share = progress.done / max(progress.total, 1)
        phase = {"measured": "measuring", "answering": "measuring"}.get(progress.phase, progress.phase)
        text = f"{share:4.0%}  {clean(progress.model)}  {progress.test}  {progress.repetition}/{progress.repetitions}"
        line = f"{text}  {phase}"
        if line != self._line:
            self._line = line
            self._status.show(line)

    def row(self, row: BenchRow) -> None:
        """Print a finished row."""
        self.clear()
        if not self._shows_rows:
            limit = f", {text}" if (text := limit_text(row)) else ""
            self._output.note(f"{row.model} {row.test}: {row.avg_ts:,.2f} ± {row.stddev_ts:,.2f} tokens/s{limit}")
            return
        room = self._output.columns()
        if room and sum(column.width + len(_GAP) for column in self._columns) - len(_GAP) > room:
            shown = [Column(column.heading, column.right or column.heading == _LIMIT) for column in self._columns]
            show_record(self._output, shown, [column.cell(row).strip() for column in self._columns])
            return
        if not self._has_heading:
            headings = [_set(column.heading, column) for column in self._columns]
            self._output.text(self._styled(_DIM, _GAP.join(headings).rstrip()))
            self._has_heading = True
        cells = [_set(clean(column.cell(row)), column) for column in self._columns]
        *others, note = cells
        text = _GAP.join([*others, self._styled(_YELLOW, note.rstrip()) if note.strip() else ""])
        self._output.text(text.rstrip())

    def clear(self) -> None:
        """Remove the live line."""
        self._line = ""
        self._status.clear()

    def end(self, result: Result) -> None:
        """Print partial rows and details on stdout, and disturbances on stderr."""
        self.clear()
        if self._shows_rows:
            for row in result.rows:
                if row.is_partial:
                    self.row(row)
            for line in details(result):
                self._output.sentence(line)
        for line in disturbances(result):
            self._output.note(line)

    def _styled(self, code: str, text: str) -> str:
        color = self._output.stdout_is_terminal and self._output.stdout_has_color
        return f"{code}{text}{_RESET}" if color and text else text


def _columns(models: Sequence[str], cases: Sequence[Case]) -> list[_Column]:
    """Return the columns: model and settings that vary, then figures. Rows are streamed, so widths are fixed."""
    found = []
    if len(models) > 1:
        longest = min(max(width(clean(name)) for name in models), _MAX_NAME)
        found.append(_Column("MODEL", longest, lambda row: cut(clean(row.model), longest), right=False))
    for name, setting in SETTINGS.items():
        values = {shown(getattr(case.settings, name)) for case in cases}
        if setting.heading and len(values) > 1:
            longest = max(map(len, [*values, setting.heading]))
            found.append(_Column(setting.heading, longest, partial(setting_text, name=name)))
    tests = max((len(case.test.name) for case in cases), default=0)
    return [
        *found,
        _Column("TEST", max(tests, len("TEST")), lambda row: row.test, right=False),
        _Column("TOKENS/S", 9, lambda row: f"{row.avg_ts:,.2f}" if row.avg_ts < 1000 else f"{row.avg_ts:,.1f}"),
        _Column("±", 6, lambda row: f"{row.stddev_ts:,.2f}" if len(row.samples_ns) > 1 else ""),
        _Column("95 %", 6, _interval),
        _Column(_LIMIT, 12, lambda row: limit_text(row, "4"), right=False),
        _Column("", _NOTE_WIDTH, _note, right=False),
    ]


def _set(text: str, column: _Column) -> str:
    padding = " " * max(column.width - width(text), 0)
    return padding + text if column.right else text + padding


def _interval(row: BenchRow) -> str:
    """Return the half width of the mean's 95 % confidence interval."""
    from llmrun.bench.significance import interval

    found = interval(row.samples_ts)
    if found is None:
        return ""
    return f"±{found.half_width:.0%}" if found.half_width >= 0.0995 else f"±{found.half_width:.1%}"


def limit_text(row: BenchRow, columns: str = "") -> str:
    """Return the share of the machine's limit and its kind, e.g. "45% memory"; "" if unknown."""
    share = row.share_of_limit
    return f"{share:{columns}.0%} {row.limit.binds}" if row.limit is not None and share is not None else ""


def _note(row: BenchRow) -> str:
    """Return a short warning; its details are below the table."""
    if row.is_partial:
        return f"stopped at {len(row.samples_ns)}/{row.repetitions}"
    if any(warning.kind == "noisy" for warning in row.warnings):
        return "too noisy"
    return "disturbed" if row.is_disturbed else ""


def details(result: Result) -> list[str]:
    """Return lines with answers' latencies, models and limits, for which the table has no room."""
    lines = [""] if result.rows else []
    for row in result.rows:
        lines += _chat(row, several=len({each.model for each in result.rows}) > 1)
    names = list(dict.fromkeys(row.model for row in result.rows))
    for name in names:
        facts = _model([row for row in result.rows if row.model == name])
        lines.append(f"{name}: {facts}" if len(names) > 1 else facts)
    return lines + _limits([row for row in result.rows if row.limit])


def _chat(row: BenchRow, *, several: bool) -> list[str]:
    chat = row.chat
    if chat is None or not chat.ttft_ns:
        return []
    first = sum(chat.ttft_ns) / len(chat.ttft_ns) / 1e9
    p50, p95, p99 = (milliseconds(ns / 1e9) for ns in (chat.token_p50_ns, chat.token_p95_ns, chat.token_p99_ns))
    decode = sum(chat.decode_ts) / len(chat.decode_ts)
    name = f"{row.model} {row.test}" if several else row.test
    flash = ", no flash attention" if row.flash_attn == 0 else ""
    return [
        f"{name}: first text after {seconds(first)}, then {decode:,.1f} tokens/s ({row.n_threads} threads{flash})",
        f"  a token every {p50}, p95 {p95}, p99 {p99}; "
        f"sampling {chat.sampling_share:.1%} of it, text {chat.text_share:.1%}",
    ]


def _model(rows: Sequence[BenchRow]) -> str:
    """Return a model's type and size, load time and peak memory."""
    row = rows[0]
    parts = [f"{row.kind}, {readable_size(row.size)}, {row.backends}"]
    loads = [each.load_ns for each in rows if each.load_ns]
    if loads:
        parts.append(f"loaded in {seconds(min(loads) / 1e9)}")
    peaks = [each.peak_bytes for each in rows if each.peak_bytes]
    if peaks:
        parts.append(f"peak memory {readable_size(max(peaks))}")
    return "; ".join(parts)


def _limits(rows: Sequence[BenchRow]) -> list[str]:
    """Return the machine's measured limits for each number of threads."""
    lines = []
    for threads in dict.fromkeys(row.n_threads for row in rows):
        own: list[Limit] = [row.limit for row in rows if row.limit and row.n_threads == threads]
        read, compute = max(limit.read_rate for limit in own), max(limit.compute_rate for limit in own)
        figures = f"{rate_of_bytes(read)} read, {compute / 1e9:,.0f} billion multiply-adds/s, as measured"
        lines.append(f"limit with {counted(threads, 'thread')}: {figures}")
    return lines


def disturbances(result: Result) -> list[str]:
    """Return a line of warnings for each row that has some."""
    names = [f"{label} {row.test}".strip() for label, row in zip(labels(result.rows), result.rows, strict=True)]
    lines = [f"{name}: {row.warning_text}" for name, row in zip(names, result.rows, strict=True) if row.warnings]
    if result.is_partial:
        complete = sum(not row.is_partial for row in result.rows)
        lines.append(f"stopped before the end: {counted(complete, 'row')} complete")
    return lines

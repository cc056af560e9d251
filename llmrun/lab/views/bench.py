"""The views of `llmrun bench`: rows as they are measured, results of the history and comparisons, and a page.

Names of models and machines are untrusted text: a result may come from another machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from llmrun.lab.bench.cases import Case
from llmrun.lab.bench.compare import Comparison, Pair
from llmrun.lab.bench.external import ExternalComparison
from llmrun.lab.bench.history import HistoryEntry
from llmrun.lab.bench.results import BenchRow, Limit, Machine, Result, setting_text
from llmrun.lab.html.render import Bar, drawable_bars, render
from llmrun.protocol.settings import SETTINGS, shown
from llmrun.protocol.sizes import readable_size
from llmrun.statistics import Verdict, interval
from llmrun.ui.terminal.activity import StatusLine
from llmrun.ui.terminal.cells import cut, width
from llmrun.ui.terminal.format import ago, counted, milliseconds, rate, rate_of_bytes, seconds
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, right, show_record, show_table

if TYPE_CHECKING:
    from llmrun.lab.bench.run import Progress

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
        lines += _chat(row, several=len({row.model for row in result.rows}) > 1)
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
    loads = [row.load_ns for row in rows if row.load_ns]
    if loads:
        parts.append(f"loaded in {seconds(min(loads) / 1e9)}")
    peaks = [row.peak_bytes for row in rows if row.peak_bytes]
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


_FLASH = {-1: "flash attention auto", 0: "no flash attention", 1: "flash attention"}


def labels(rows: Sequence[BenchRow]) -> list[str]:
    """Return each row's model and settings, without settings that are equal in all rows."""
    models = _distinct([model_name(row) for row in rows])
    settings = [_settings(row) | {"model": model} for row, model in zip(rows, models, strict=True)]
    varying = [name for name in (settings[0] if settings else {}) if len({s[name] for s in settings}) > 1]
    return [", ".join(filter(None, (setting[name] for name in varying))) for setting in settings]


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names without the words that all of them begin with."""
    first, last = min(names, default=""), max(names, default="")
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    cut = 0 if first == last else max(first[:same].rfind(mark) for mark in " -_./:") + 1
    return [name[cut:] or name for name in names]


def _settings(row: BenchRow) -> dict[str, str]:
    return {
        "program": row.program,
        "model": model_name(row),
        "threads": counted(row.n_threads, "thread"),
        "threads_batch": f"{row.n_threads_batch} for prompts" if row.n_threads_batch else "",
        "batch": f"batch {row.n_batch}",
        "ubatch": f"ubatch {row.n_ubatch}",
        "keys": f"keys {row.type_k}",
        "values": f"values {row.type_v}",
        "flash": _FLASH.get(row.flash_attn, ""),
        "repack": "repacked" if row.repack else "not repacked",
        "load": "read" if row.load_mode == "none" else "mapped",
        "gpu": f"{row.n_gpu_layers} layers on the GPU" if row.n_gpu_layers >= 0 else "all layers on the GPU",
        "environment": " ".join(f"{name}={value}" for name, value in sorted(row.environment.items())),
    }


def model_name(row: BenchRow) -> str:
    """Return the model's name, or the best substitute that a result has."""
    return row.model or PurePath(row.model_filename).name or row.model_type or "a model"


def machine_facts(machine: Machine) -> list[tuple[str, str]]:
    """Return (name, value) of all known facts. Results can be from other machines, so the texts are untrusted."""
    facts = [
        ("Machine", machine.name),
        ("Processor", machine.cpu),
        ("Kernels for", ", ".join(machine.cpu_flags)),
        ("Cores", f"{machine.cores}, and {machine.threads} threads can compute at a time" if machine.cores else ""),
        ("Limit of the container", f"{machine.cpu_quota:g} cores" if machine.cpu_quota else ""),
        ("Memory", readable_size(machine.memory_total) if machine.memory_total else ""),
        ("Memory speed", machine.memory_speed),
        ("GPUs", ", ".join(machine.gpus)),
        ("System", ", ".join(filter(None, (machine.os, machine.kernel)))),
        ("Frequency governor", machine.governor),
        ("llmrun", machine.llmrun),
        ("llama-cpp-python", machine.llama),
        ("ggml", machine.build_commit),
        ("Python", machine.python),
    ]
    return [(name, value) for name, value in facts if value]


def show_entries(output: Output, entries: Sequence[HistoryEntry]) -> None:
    """Print the history on stdout, the newest result first."""
    columns = (
        Column("NUMBER", right=True, style="bold"),
        Column("WHEN"),
        Column("MODELS"),
        Column("TESTS"),
        Column("MACHINE", style="dim"),
    )
    now = time.time()
    rows = [
        (str(entry.number), ago(now - entry.time), ", ".join(entry.models), entry.tests, entry.machine)
        for entry in entries
    ]
    show_table(output, columns, rows)


def show_result(output: Output, result: Result) -> None:
    """Print one result; settings that vary are part of a row's name."""
    columns = (Column("TEST"), *right("TOKENS/S", "±"), Column("OF LIMIT"))
    rows = [
        (f"{label} {row.test}".strip(), f"{row.avg_ts:,.2f}", f"{row.stddev_ts:,.2f}", limit_text(row))
        for row, label in zip(result.rows, labels(result.rows), strict=True)
    ]
    show_table(output, columns, rows)
    for line in [
        *details(result),
        f"measured on {result.machine.name or result.machine.cpu}, {result.rows[0].test_time}",
    ]:
        output.sentence(line)
    for line in disturbances(result):
        output.note(line)


def show_comparison(output: Output, comparison: Comparison) -> None:
    """Print ratios with intervals and verdicts on stdout, other differences below."""
    columns = (Column("TEST"), *right("A", "B", "B / A"), Column("95 %", style="dim"), Column("VERDICT", style="bold"))
    show_table(output, columns, [_cells(pair) for pair in comparison.pairs])
    output.text("")
    output.sentence(f"A is {comparison.a}, B is {comparison.b}: {comparison.summary}")
    for difference in comparison.machines:
        output.sentence(f"  {difference}")
    for side, rows in (("A", comparison.only_a), ("B", comparison.only_b)):
        if rows:
            output.sentence(f"only in {side}: " + ", ".join(dict.fromkeys(row.test for row in rows)))
    for pair in comparison.pairs:
        for note in [*map(str, pair.differences), *pair.notes]:
            output.note(f"{pair.a.test}: {note}")


def show_versus(output: Output, found: Sequence[ExternalComparison], rival: str) -> None:
    """Print both sides of each test and their ratio on stdout, differences of the setup on stderr."""
    columns = (
        Column("TEST"),
        *right("LLMRUN", rival.upper(), "RATIO"),
        Column("95 %", style="dim"),
        Column("LLMRUN IS", style="bold"),
    )
    ours = [each.ours for each in found]
    rows = []
    for label, each in zip(labels(ours), found, strict=True):
        name = f"{label} {each.ours.test}".strip()
        rows.append((name, f"{each.ours.avg_ts:,.2f}", f"{each.theirs.avg_ts:,.2f}", *_verdict(each.verdict)))
    show_table(output, columns, rows)
    for label, each in zip(labels(ours), found, strict=True):
        for note in each.notes:
            output.note(f"{label} {each.ours.test}".strip() + f": {note}")


def _verdict(verdict: Verdict) -> tuple[str, str, str]:
    between = f"{verdict.low:.3f} - {verdict.high:.3f}" if verdict.low > 0 and verdict.high < float("inf") else ""
    return f"{verdict.ratio:.3f}", between, verdict.words


def _cells(pair: Pair) -> tuple[str, ...]:
    name = f"{pair.a.model} {pair.a.test}" if pair.a.model == pair.b.model else pair.a.test
    return (name, f"{pair.a.avg_ts:,.2f}", f"{pair.b.avg_ts:,.2f}", *_verdict(pair.verdict))


_MAX_BARS = 24
_MAX_MODELS = 4


class _LabelledRow(NamedTuple):
    """A row; share is its speed's share of the fastest row of its kind."""

    row: BenchRow
    label: str
    share: float | None
    half_width: str

    @property
    def name(self) -> str:
        return f"{self.label}, {self.row.test}" if self.label else self.row.test


def bench_page(result: Result) -> str:
    """Return the page of a result. All texts of a result are untrusted: it may come from another machine."""
    rows = _labelled(result.rows)
    models = list(dict.fromkeys(map(model_name, result.rows)))
    place = result.machine.cpu or result.machine.name
    names = ", ".join(models[:_MAX_MODELS]) + (", ..." if len(models) > _MAX_MODELS else "")
    prefill = [labelled for labelled in rows if labelled.row.n_gen == 0]
    decode = [labelled for labelled in rows if labelled.row.n_prompt == 0 and labelled.row.n_gen]
    both = [labelled for labelled in rows if labelled.row.n_prompt and labelled.row.n_gen]
    # Three charts, because the kinds' speeds are too different for one scale.
    charts = [
        (title, bars)
        for title, kind in (
            ("Prefill: reading a prompt", prefill),
            ("Decode: writing an answer", decode),
            ("Prompt and answer together", both),
        )
        if (bars := drawable_bars(map(_bar, kind[:_MAX_BARS])))
    ]
    return render(
        "bench",
        title=f"Bench of {models[0]}" if len(models) == 1 else f"Bench of {len(models)} models",
        lead=f"{names}{f' on {place}' if place else ''}.",
        rows=rows,
        best=_best(prefill, decode, result.rows),
        charts=charts,
        is_partial=result.is_partial,
        machine=_machine(result.machine, result.rows),
    )


def _labelled(rows: Sequence[BenchRow]) -> list[_LabelledRow]:
    fastest: dict[bool, float] = {}
    for row in rows:
        fastest[row.n_gen == 0] = max(fastest.get(row.n_gen == 0, 0.0), row.avg_ts)
    result = []
    for row, label in zip(rows, labels(rows), strict=True):
        found, best = interval(row.samples_ts), fastest[row.n_gen == 0]
        half_width = f" ± {found.mean * found.half_width:,.1f}" if found else ""
        result.append(_LabelledRow(row, label, row.avg_ts / best if best else None, half_width))
    return result


def _best(
    prefill: Sequence[_LabelledRow], decode: Sequence[_LabelledRow], rows: Sequence[BenchRow]
) -> list[tuple[str, str]]:
    tiles = []
    for phase, kind in (("prefill", prefill), ("decode", decode)):
        best = max(kind, key=lambda each: each.row.avg_ts, default=None)
        if best is not None:
            share = best.row.share_of_limit
            limit = f"; {share:.0%} of the limit" if share is not None else ""
            tiles.append((rate(best.row.avg_ts, whole=True), f"{phase}: {best.name}{limit}"))
    peak = max((row.peak_bytes or 0 for row in rows), default=0)
    return tiles + ([(readable_size(peak), "peak memory")] if peak else [])


def _bar(each: _LabelledRow) -> Bar:
    row, found = each.row, interval(each.row.samples_ts)
    low, high = (found.low, found.high) if found else (None, None)
    limit = row.limit.tokens_per_second if row.limit else None
    return Bar(each.name, row.avg_ts, low, high, row.samples_ts, limit, note=row.warning_text)


def _machine(machine: Machine, rows: Sequence[BenchRow]) -> list[tuple[str, str]]:
    times = sorted(row.test_time for row in rows if row.test_time)
    files = dict.fromkeys(PurePath(row.model_filename).name for row in rows if row.model_filename)
    measured = " to ".join(dict.fromkeys((times[0], times[-1]))) if times else ""
    facts = [*machine_facts(machine), ("Measured", measured), ("Files", ", ".join(files))]
    return [(name, value) for name, value in facts if value]

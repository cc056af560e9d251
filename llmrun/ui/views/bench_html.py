"""A bench result as one HTML page: what was measured where, tables, and bars by test.

Owns which plots a result has something to show in; must not know how it was measured or compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from llmrun.bench.results import BenchRow, Machine, Result
from llmrun.bench.statistics import interval
from llmrun.protocol.sizes import readable_size
from llmrun.ui.html.page import Cell, FactList, Figure, Paragraph, Part, Section, Table, Tiles, page
from llmrun.ui.html.plot_frame import Axis
from llmrun.ui.html.plots import Bar, bar_chart
from llmrun.ui.terminal.format import milliseconds, rate
from llmrun.ui.views.machine_facts import machine_facts
from llmrun.ui.views.report_text import NONE

_MOST_BARS = 24
_MOST_MODELS = 4
_NUMBERS = {"Tokens/s", "Of limit", "Load", "Peak memory", "Per token"}
_FLASH = {-1: "flash attention auto", 0: "no flash attention", 1: "flash attention"}


def bench_page(result: Result) -> str:
    """The whole page. Everything in a result is untrusted text: it may come from another machine."""
    rows = [_LabelledRow(row, label) for row, label in zip(result.rows, labels(result.rows), strict=True)]
    sections = [
        Section("", tuple(_first(rows, result))),
        Section("Results", tuple(_tables(rows))),
        Section("By test", tuple(_bars(rows))),
        Section("Where it was measured", (FactList(tuple(_place(result.machine, result.rows))),)),
    ]
    models = list(dict.fromkeys(_model(row) for row in result.rows))
    title = f"Bench of {models[0]}" if len(models) == 1 else f"Bench of {len(models)} models"
    place = result.machine.cpu or result.machine.name
    named = ", ".join(models[:_MOST_MODELS]) + (", ..." if len(models) > _MOST_MODELS else "")
    lead = f"{named}{f' on {place}' if place else ''}."
    return page(title, [section for section in sections if section.parts], lead=lead)


# ---- what tells rows apart -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LabelledRow:
    """A row, and what tells its model and settings from the others'."""

    row: BenchRow
    label: str

    @property
    def name(self) -> str:
        return f"{self.label}, {self.row.test}" if self.label else self.row.test


def labels(rows: Sequence[BenchRow]) -> list[str]:
    """For each row its model and settings, of which only those that are not the same everywhere."""
    models = _distinct([_model(row) for row in rows])
    settings = [_settings(row) | {"model": model} for row, model in zip(rows, models, strict=True)]
    telling = [name for name in (settings[0] if settings else {}) if len({s[name] for s in settings}) > 1]
    return [", ".join(filter(None, (each[name] for name in telling))) for each in settings]


def _distinct(names: Sequence[str]) -> list[str]:
    """Names without the words that all of them begin with."""
    first, last = min(names, default=""), max(names, default="")
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    cut = 0 if first == last else max(first[:same].rfind(mark) for mark in " -_./:") + 1
    return [name[cut:] or name for name in names]


def _settings(row: BenchRow) -> dict[str, str]:
    return {
        "program": row.program,
        "model": _model(row),
        "threads": f"{row.n_threads} {'thread' if row.n_threads == 1 else 'threads'}",
        "threads_batch": f"{row.n_threads_batch} for prompts" if row.n_threads_batch else "",
        "batch": f"batch {row.n_batch}",
        "ubatch": f"ubatch {row.n_ubatch}",
        "keys": f"keys {row.type_k}",
        "values": f"values {row.type_v}",
        "flash": _FLASH.get(row.flash_attn, ""),
        "repack": "repacked" if row.repack else "not repacked",
        "load": "mapped" if row.load_mode == "mmap" else "read",
        "gpu": f"{row.n_gpu_layers} layers on the GPU" if row.n_gpu_layers >= 0 else "all layers on the GPU",
        "environment": " ".join(f"{name}={value}" for name, value in sorted(row.environment.items())),
    }


def _model(row: BenchRow) -> str:
    return row.model or PurePath(row.model_filename).name or row.model_type or "a model"


def _is_prefill(row: BenchRow) -> bool:
    return row.n_gen == 0


def _base(row: BenchRow) -> str:
    """The test without its depth."""
    return row.test.partition(" @ ")[0]


# ---- numbers ---------------------------------------------------------------------------------------


def _first(rows: Sequence[_LabelledRow], result: Result) -> list[Part]:
    parts: list[Part] = []
    tiles = []
    for words, kept in (
        ("prefill", [each for each in rows if _is_prefill(each.row)]),
        ("decode", [each for each in rows if each.row.n_prompt == 0 and each.row.n_gen]),
    ):
        best = max(kept, key=lambda each: each.row.avg_ts, default=None)
        if best is not None:
            share = best.row.share_of_limit
            limit = f"; {share:.0%} of the limit" if share is not None else ""
            tiles.append((rate(best.row.avg_ts, whole=True), f"{words}: {best.name}{limit}"))
    peak = max((each.row.peak_bytes or 0 for each in rows), default=0)
    if peak:
        tiles.append((readable_size(peak), "most memory in use"))
    if tiles:
        parts.append(Tiles(tuple(tiles)))
    if result.is_partial:
        parts.append(Paragraph("The bench was stopped early: some rows have fewer samples, others are missing."))
    return parts


def _tables(rows: Sequence[_LabelledRow]) -> list[Part]:
    if not rows:
        return [Paragraph("Nothing was measured.")]
    parts: list[Part] = [_speeds(rows)]
    chats = [each for each in rows if each.row.chat is not None]
    if chats:
        parts.append(_chats(chats))
    return parts


def _speeds(rows: Sequence[_LabelledRow]) -> Table:
    has_label = any(each.label for each in rows)
    has_energy = any(each.row.joules_per_token is not None for each in rows)
    has_warnings = any(each.row.warnings for each in rows)
    most: dict[bool, float] = {}
    for each in rows:
        most[_is_prefill(each.row)] = max(most.get(_is_prefill(each.row), 0.0), each.row.avg_ts)
    lines = []
    for each in rows:
        row = each.row
        share = row.share_of_limit
        cells = [Cell(each.label)] if has_label else []
        cells += [
            Cell(_base(row) + row.test.removeprefix(_base(row)).replace(" ", "\u00a0")),
            Cell(_speed(row), row.avg_ts, row.avg_ts / most[_is_prefill(row)] if most[_is_prefill(row)] else None),
            Cell(NONE if share is None else f"{share:.0%}", share),
            Cell(row.limit.binds if row.limit else NONE),
            Cell(NONE if row.load_ns is None else f"{row.load_ns / 1e9:.2f} s", row.load_ns),
            Cell(NONE if row.peak_bytes is None else readable_size(row.peak_bytes), row.peak_bytes),
        ]
        energy = row.joules_per_token
        cells += [Cell(NONE if energy is None else f"{energy:.3g} J", energy)] if has_energy else []
        cells += [Cell(row.warning_text)] if has_warnings else []
        lines.append(tuple(cells))
    names = ["Test", "Tokens/s", "Of limit", "Bound by", "Load", "Peak memory"]
    names = [*(["Model and settings"] if has_label else []), *names]
    names += [*(["Per token"] if has_energy else []), *(["Warnings"] if has_warnings else [])]
    words = frozenset({len(names) - 1}) if has_warnings else frozenset[int]()
    numbers = frozenset(i for i, name in enumerate(names) if name in _NUMBERS)
    note = "± is the 95 % interval of the mean. Bars compare prompts with prompts and answers with answers. "
    return Table(tuple(names), tuple(lines), numbers, words, note=note + "Click a heading to sort.")


def _speed(row: BenchRow) -> str:
    found = interval(row.samples_ts)
    return f"{row.avg_ts:,.1f}" + (f" ± {found.mean * found.half_width:,.1f}" if found else "")


def _chats(rows: Sequence[_LabelledRow]) -> Table:
    lines = []
    for each in rows:
        chat = each.row.chat
        assert chat is not None
        first = sum(chat.ttft_ns) / len(chat.ttft_ns) if chat.ttft_ns else 0.0
        decode = sum(chat.decode_ts) / len(chat.decode_ts) if chat.decode_ts else 0.0
        lines.append(
            (
                Cell(each.name),
                Cell(milliseconds(first / 1e9), first),
                Cell(rate(decode), decode),
                *(Cell(milliseconds(ns / 1e9), ns) for ns in (chat.token_p50_ns, chat.token_p95_ns, chat.token_p99_ns)),
                Cell(f"{chat.sampling_share:.1%}", chat.sampling_share),
                Cell(f"{chat.text_share:.1%}", chat.text_share),
            )
        )
    names = ("Answers", "First text", "Then", "p50", "p95", "p99", "Sampling", "Text")
    note = "With our own sampling and streaming. p50 to p99: from one token to the next. Sampling, text: of the time."
    return Table(names, tuple(lines), frozenset(range(1, 8)), note=note)


# ---- plots -----------------------------------------------------------------------------------------


def _bars(rows: Sequence[_LabelledRow]) -> list[Part]:
    """Prefill, decode and what has both, apart: their speeds are too different for one scale."""
    kinds = [
        ("Prefill: reading a prompt", [each for each in rows if _is_prefill(each.row)]),
        ("Decode: writing an answer", [each for each in rows if each.row.n_prompt == 0]),
        ("Prompt and answer together", [each for each in rows if each.row.n_prompt and each.row.n_gen]),
    ]
    parts: list[Part] = []
    for title, kept in kinds:
        if kept:
            parts.append(Figure(bar_chart([_bar(each) for each in kept[:_MOST_BARS]], Axis("", "t/s"), title)))
    if parts:
        said = "Dots are single repetitions, whiskers the 95 % interval of their mean"
        said += "; the upright mark is what the machine could do at most." if any(e.row.limit for e in rows) else "."
        parts.append(Paragraph(said, small=True))
    return parts


def _bar(each: _LabelledRow) -> Bar:
    row = each.row
    found = interval(row.samples_ts)
    limit = row.limit.tokens_per_second if row.limit else None
    low, high = (found.low, found.high) if found else (None, None)
    return Bar(each.name, row.avg_ts, low, high, row.samples_ts, limit, note=row.warning_text)


# ---- machine ---------------------------------------------------------------------------------------


def _place(machine: Machine, rows: Sequence[BenchRow]) -> list[tuple[str, str]]:
    times, files = _times(rows), dict.fromkeys(row.model_filename for row in rows if row.model_filename)
    facts = machine_facts(machine)
    facts += [("Measured", " to ".join(sorted({min(times), max(times)})))] if times else []
    return facts + ([("Files", ", ".join(PurePath(file).name for file in files))] if files else [])


def _times(rows: Sequence[BenchRow]) -> list[str]:
    return [row.test_time for row in rows if row.test_time]

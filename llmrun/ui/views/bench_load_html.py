"""What `llmrun bench --clients` measured as one HTML page: a table, bars by number of clients, tokens/s against time.

Owns which figures are drawn; must not know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from llmrun.bench.load import LEAST_FOR_A_KNEE, LoadCase, LoadOutcome, LoadRequest, LoadRow
from llmrun.bench.noise import sample_warnings
from llmrun.bench.results import Machine
from llmrun.ui.html.page import Cell, FactList, Figure, Paragraph, Part, Section, Table, Tiles, page
from llmrun.ui.html.plot_frame import Axis
from llmrun.ui.html.plots import Bar, Dot, bar_chart, dot_chart
from llmrun.ui.terminal.format import counted, milliseconds, rate
from llmrun.ui.views.bench_load import early, knees, knows_cached, prompts
from llmrun.ui.views.machine_facts import machine_facts

_HEADINGS = (
    "Clients", "Prompts", "Tokens/s", "Each client", "TTFT p50", "TTFT p95", "Inter-token p50", "p95", "p99", "Cached",
)  # fmt: skip
_CACHED_NOTE = "Cached: prompt tokens found in the KV cache. "


def load_page(request: LoadRequest, outcome: LoadOutcome, machine: Machine) -> str:
    """The whole page, of one row at least."""
    rows = outcome.rows
    curves = _curves(outcome)
    sections = [
        Section("", _first(outcome)),
        Section("Results", (_table(rows, with_cached=knows_cached(request, outcome)), *_doubts(request, outcome))),
        Section("By number of clients", _bars(rows)),
        *([Section("What more clients gain and cost", curves)] if curves else []),
        Section("Where it was measured", (FactList(tuple(_place(request, machine))),)),
    ]
    lead = f"{prompts(outcome).capitalize()}, answers of {request.tokens:,}."
    return page(f"{request.model} with several clients", sections, lead=lead)


def _name(row: LoadRow) -> str:
    return LoadCase(row.clients, row.shares_prompt).name


def _first(outcome: LoadOutcome) -> tuple[Part, ...]:
    best = max(outcome.rows, key=lambda row: row.avg_ts)
    tiles = Tiles(((rate(best.avg_ts, whole=True), f"all together: {_name(best)}"),))
    stopped = "The measurement was stopped early: some repetitions are missing."
    return (tiles,) if outcome.error is None else (tiles, Paragraph(stopped))


def _table(rows: Sequence[LoadRow], *, with_cached: bool) -> Table:
    most = max(row.avg_ts for row in rows)
    lines = tuple(
        (
            Cell(str(row.clients), row.clients),
            Cell("shared" if row.shares_prompt else "own"),
            Cell(f"{row.avg_ts:,.1f} ± {row.stddev_ts:,.1f}", row.avg_ts, row.avg_ts / most if most else None),
            Cell(rate(row.client_ts), row.client_ts),
            *(
                Cell(milliseconds(ns / 1e9), ns)
                for ns in (row.ttft_p50_ns, row.ttft_p95_ns, row.token_p50_ns, row.token_p95_ns, row.token_p99_ns)
            ),
            *([Cell(f"{row.cached_share:.0%}", row.cached_share)] if with_cached else ()),
        )
        for row in rows
    )
    note = (
        "Shared prompts differ only at their end. Tokens/s of all clients, ± the standard deviation; of each client, "
        f"behind its first token. {_CACHED_NOTE if with_cached else ''}Click a heading to sort."
    )
    headings = _HEADINGS if with_cached else _HEADINGS[:-1]
    return Table(headings, lines, frozenset({0, *range(2, len(headings))}), note=note)


def _doubts(request: LoadRequest, outcome: LoadOutcome) -> list[Part]:
    """What makes figures doubtful."""
    said = [f"{_name(row)}: {each.text}" for row in outcome.rows for each in sample_warnings(row.samples_ts)]
    said += [f"meanwhile {each.text}" for each in outcome.warnings] + list(filter(None, [early(request, outcome)]))
    return [Paragraph("; ".join(said), small=True)] if said else []


def _bars(rows: Sequence[LoadRow]) -> tuple[Part, ...]:
    figures: tuple[tuple[str, str, Callable[[LoadRow], float]], ...] = (
        ("Tokens/s of all clients", "t/s", lambda row: row.avg_ts),
        ("Time to first token, median", "ms", lambda row: row.ttft_p50_ns / 1e6),
        ("Inter-token latency, 95th percentile", "ms", lambda row: row.token_p95_ns / 1e6),
    )
    return tuple(
        Figure(bar_chart([_bar(row, value, unit) for row in rows], Axis("", unit), title))
        for title, unit, value in figures
    )


def _bar(row: LoadRow, value: Callable[[LoadRow], float], unit: str) -> Bar:
    return Bar(_name(row), value(row), samples=row.samples_ts if unit == "t/s" else (), dull=row.shares_prompt)


def _curves(outcome: LoadOutcome) -> tuple[Part, ...]:
    """Tokens/s against the time of an answer, with the knee, for each kind of prompts that has one or may have."""
    charts: list[Part] = []
    for kind, knee in knees(outcome):
        rows = [row for row in outcome.rows if row.shares_prompt == (kind == "shared")]
        if len(rows) >= LEAST_FOR_A_KNEE:
            dots = [_dot(row, is_knee=row is knee) for row in rows]
            axes = Axis("time of an answer, median", "s"), Axis("tokens/s of all clients", "t/s")
            charts.append(Figure(dot_chart(dots, *axes, f"Throughput against latency, {kind} prompts")))
    note = (
        "The knee is where tokens/s divided by the time of an answer is largest (Kleinrock's power): beyond it, more "
        "clients cost each of them more time than all of them gain. Where none is marked, it lies beyond the last one."
    )
    return (*charts, Paragraph(note, small=True)) if charts else ()


def _dot(row: LoadRow, *, is_knee: bool) -> Dot:
    name = counted(row.clients, "client")
    kind: Literal["front", "beaten"] = "front" if is_knee else "beaten"
    return Dot(name, row.answer_p50_ns / 1e9, row.avg_ts, "knee" if is_knee else "", row.clients, kind, joined=True)


def _place(request: LoadRequest, machine: Machine) -> list[tuple[str, str]]:
    if request.load is None:
        return [("Server", request.server), ("Model", request.model)]
    loaded = [("Threads", str(request.load.threads)), ("Context", f"{request.load.n_ctx:,} tokens for each client")]
    return [*machine_facts(machine), *loaded]

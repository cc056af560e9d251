"""What `llmrun bench --clients` measured as one HTML page: a table, and bars by number of clients.

Owns which figures get bars; must not know how anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmrun.bench.load import LoadCase, LoadOutcome, LoadRequest, LoadRow
from llmrun.bench.noise import sample_warnings
from llmrun.bench.results import Machine
from llmrun.ui.html.page import Cell, FactList, PageFigure, Paragraph, Part, Section, Table, Tiles, page
from llmrun.ui.html.plot_frame import PlotAxis
from llmrun.ui.html.plots import Bar, bar_chart
from llmrun.ui.terminal.format import milliseconds, rate
from llmrun.ui.views.machine_facts import machine_facts

_HEADINGS = (
    "Clients", "Prompts", "Tokens/s", "Each client", "TTFT p50", "TTFT p95", "Inter-token p50", "p95", "p99", "Cached",
)  # fmt: skip


def load_page(request: LoadRequest, outcome: LoadOutcome, machine: Machine) -> str:
    """The whole page, of one row at least."""
    rows = outcome.rows
    sections = [
        Section("", _first(outcome)),
        Section("Results", (_table(rows), *_doubts(outcome))),
        Section("By number of clients", _bars(rows)),
        Section("Where it was measured", (FactList(tuple(_place(request, machine))),)),
    ]
    lead = f"Prompts of {rows[-1].prompt_tokens:,} tokens, answers of {request.tokens:,}."
    return page(f"{request.model} with several clients", sections, lead=lead)


def _name(row: LoadRow) -> str:
    return LoadCase(row.clients, row.shares_prompt).name


def _first(outcome: LoadOutcome) -> tuple[Part, ...]:
    best = max(outcome.rows, key=lambda row: row.avg_ts)
    tiles = Tiles(((rate(best.avg_ts, whole=True), f"all together: {_name(best)}"),))
    stopped = "The measurement was stopped early: some repetitions are missing."
    return (tiles,) if outcome.error is None else (tiles, Paragraph(stopped))


def _table(rows: Sequence[LoadRow]) -> Table:
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
            Cell(f"{row.cached_share:.0%}", row.cached_share),
        )
        for row in rows
    )
    note = (
        "Shared prompts differ only at their end. Tokens/s of all clients, ± the standard deviation; of each client, "
        "behind its first token. Cached: prompt tokens found in the KV cache. Click a heading to sort."
    )
    return Table(_HEADINGS, lines, frozenset({0, *range(2, len(_HEADINGS))}), note=note)


def _doubts(outcome: LoadOutcome) -> list[Part]:
    """What makes figures doubtful."""
    said = [f"{_name(row)}: {each.text}" for row in outcome.rows for each in sample_warnings(row.samples_ts)]
    said += [f"meanwhile {each.text}" for each in outcome.warnings]
    return [Paragraph("; ".join(said), small=True)] if said else []


def _bars(rows: Sequence[LoadRow]) -> tuple[Part, ...]:
    figures: tuple[tuple[str, str, Callable[[LoadRow], float]], ...] = (
        ("Tokens/s of all clients", "t/s", lambda row: row.avg_ts),
        ("Time to first token, median", "ms", lambda row: row.ttft_p50_ns / 1e6),
        ("Inter-token latency, 95th percentile", "ms", lambda row: row.token_p95_ns / 1e6),
    )
    return tuple(
        PageFigure(bar_chart([_bar(row, value, unit) for row in rows], PlotAxis("", unit), title))
        for title, unit, value in figures
    )


def _bar(row: LoadRow, value: Callable[[LoadRow], float], unit: str) -> Bar:
    return Bar(_name(row), value(row), samples=row.samples_ts if unit == "t/s" else (), dull=row.shares_prompt)


def _place(request: LoadRequest, machine: Machine) -> list[tuple[str, str]]:
    loaded = [("Threads", str(request.load.threads)), ("Context", f"{request.load.n_ctx:,} tokens for each client")]
    return [*machine_facts(machine), *loaded]

"""The result of `llmrun bench --clients` as an HTML page; bench_load.html.jinja has the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmrun.bench.load import LEAST_FOR_A_KNEE, LoadCase, LoadOutcome, LoadRequest, LoadRow
from llmrun.bench.machine import sample_warnings
from llmrun.bench.results import Machine
from llmrun.ui.html.charts import Bar, Dot, drawable_bars, scatter
from llmrun.ui.html.render import render
from llmrun.ui.terminal.format import counted, rate
from llmrun.ui.views.bench_load import early, knees, knows_cached, prompts
from llmrun.ui.views.machine_facts import machine_facts


def load_page(request: LoadRequest, outcome: LoadOutcome, machine: Machine) -> str:
    """Return the page of an outcome with at least one row."""
    best = max(outcome.rows, key=lambda row: row.avg_ts)
    return render(
        "bench_load",
        title=f"{request.model} with several clients",
        lead=f"{prompts(outcome).capitalize()}, answers of {request.tokens:,}.",
        rows=outcome.rows,
        best=(rate(best.avg_ts, whole=True), f"all together: {_name(best)}"),
        fastest=best.avg_ts,
        has_cached=knows_cached(request, outcome),
        is_partial=outcome.error is not None,
        warnings=_warnings(request, outcome),
        charts=_charts(outcome.rows),
        plots=_plots(outcome),
        place=_place(request, machine),
    )


def _name(row: LoadRow) -> str:
    return LoadCase(row.clients, row.shares_prompt).name


def _warnings(request: LoadRequest, outcome: LoadOutcome) -> list[str]:
    texts = [f"{_name(row)}: {each.text}" for row in outcome.rows for each in sample_warnings(row.samples_ts)]
    return [*texts, *(f"meanwhile {each.text}" for each in outcome.warnings), *filter(None, [early(request, outcome)])]


def _charts(rows: Sequence[LoadRow]) -> list[tuple[str, str, list[Bar]]]:
    speeds = [Bar(_name(row), row.avg_ts, samples=row.samples_ts, dull=row.shares_prompt) for row in rows]
    first = [Bar(_name(row), row.ttft_p50_ns / 1e6, dull=row.shares_prompt) for row in rows]
    gaps = [Bar(_name(row), row.token_p95_ns / 1e6, dull=row.shares_prompt) for row in rows]
    return [
        ("Tokens/s of all clients", "tokens/s", drawable_bars(speeds)),
        ("Time to first token, median", "ms", drawable_bars(first)),
        ("Inter-token latency, 95th percentile", "ms", drawable_bars(gaps)),
    ]


def _plots(outcome: LoadOutcome) -> list[dict[str, Any]]:
    """Return tokens/s against the time of an answer, for each kind of prompts with enough rows for a knee."""
    plots = []
    for kind, knee in knees(outcome):
        rows = [row for row in outcome.rows if row.shares_prompt == (kind == "shared")]
        dots = [_dot(row, is_knee=row is knee) for row in rows]
        if len(rows) >= LEAST_FOR_A_KNEE:
            axes = ("time of an answer, median", "s"), ("tokens/s of all clients", "tokens/s")
            plots.append(scatter(f"Throughput against latency, {kind} prompts", dots, *axes))
    return plots


def _dot(row: LoadRow, *, is_knee: bool) -> Dot:
    caption, kind = ("knee", "front") if is_knee else ("", "beaten")
    name = counted(row.clients, "client")
    return Dot(name, row.answer_p50_ns / 1e9, row.avg_ts, caption, row.clients, kind, joined=True)


def _place(request: LoadRequest, machine: Machine) -> list[tuple[str, str]]:
    if request.load is None:
        return [("Server", request.server), ("Model", request.model)]
    loaded = [("Threads", str(request.load.threads)), ("Context", f"{request.load.n_ctx:,} tokens for each client")]
    return [*machine_facts(machine), *loaded]

"""The views of `llmrun bench --clients` and `--speculate`: a table and a small chart, JSON, or a page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import llmrun
from llmrun.lab.bench.load import LEAST_FOR_A_KNEE, PROMPT_TOKENS, LoadCase, LoadOutcome, LoadRequest, LoadRow
from llmrun.lab.bench.machine import describe, sample_warnings
from llmrun.lab.bench.results import Machine
from llmrun.lab.bench.speculation import SpeculationOutcome, SpeculationRow
from llmrun.lab.html.render import Bar, Dot, drawable_bars, render, scatter
from llmrun.lab.views.bench import machine_facts
from llmrun.lab.views.tune import times
from llmrun.protocol.codec import as_dict
from llmrun.protocol.loading import Load
from llmrun.ui.terminal.format import bar, counted, rate
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, right, show_table

_BAR_CELLS = 24
_COLUMNS = (
    Column("CLIENTS", right=True),
    Column("PROMPT"),
    *right("TOKENS/S", "EACH", "TTFT P50/95", "ITL P50/95/99", "CACHED"),
)
_CHART = (
    Column("CLIENTS", right=True),
    Column("PROMPT"),
    Column("TOKENS/S", style="cyan"),
    Column("ANSWER", right=True),
    Column("", style="bold"),
)
_ANSWER = "time of a whole answer, median"
KNEE = (
    f"ANSWER: {_ANSWER}; knee: the most tokens/s for the time of an answer, beyond it clients cost more than they gain"
)


def show_outcome(output: Output, request: LoadRequest, outcome: LoadOutcome, machine: str) -> None:
    """Print the rows on stdout, and warnings on stderr.

    Args:
        machine: the user's name for this machine; "" for its own name.
    """
    if output.json:
        output.result_json(as_json(request, outcome, machine))
    else:
        with_cached = knows_cached(request, outcome)
        show_table(
            output, _COLUMNS if with_cached else _COLUMNS[:-1], [_cells(row, with_cached) for row in outcome.rows]
        )
        output.sentence("; ".join(_explained(request, outcome, with_cached=with_cached)))
        _show_chart(output, outcome)
    for row in outcome.rows:
        for warning in sample_warnings(row.samples_ts):
            output.note(f"{LoadCase(row.clients, row.shares_prompt).name}: {warning.text}")
    if note := early(request, outcome):
        output.note(note)
    for warning in outcome.warnings:
        output.note(f"meanwhile {warning.text}")
    if outcome.error is not None:
        complete = sum(len(row.samples_ts) == request.repetitions for row in outcome.rows)
        output.note(f"stopped before the end: {complete} of {counted(len(request.cases), 'row')} complete")


def knows_cached(request: LoadRequest, outcome: LoadOutcome) -> bool:
    """Return whether the share of cached prompt tokens is known: few servers report it."""
    return request.load is not None or any(row.cached_share for row in outcome.rows)


def as_json(request: LoadRequest, outcome: LoadOutcome, machine: str) -> dict[str, Any]:
    """Return the whole outcome as JSON data."""
    return {
        "model": request.model,
        "version": llmrun.__version__,
        "tokens": request.tokens,
        "repetitions": request.repetitions,
        **_place(request),
        "is_partial": outcome.error is not None,
        "rows": [as_dict(row) for row in outcome.rows],
        "knees": {name: knee.clients if knee else None for name, knee in knees(outcome)},
        "warnings": [warning._asdict() for warning in outcome.warnings],
        "machine": as_dict(describe(name=machine)),
    }


def knees(outcome: LoadOutcome) -> tuple[tuple[str, LoadRow | None], ...]:
    """Return the knee for each kind of prompts, "own" and "shared"."""
    return ("own", outcome.knee(shares_prompt=False)), ("shared", outcome.knee(shares_prompt=True))


def _place(request: LoadRequest) -> dict[str, Any]:
    if request.load is None:
        return {"server": request.server}
    return {"threads": request.load.threads, "n_ctx": request.load.n_ctx}


def _explained(request: LoadRequest, outcome: LoadOutcome, *, with_cached: bool) -> list[str]:
    """Return explanations of the table's columns."""
    words = [
        f"{prompts(outcome)}, answers of {request.tokens:,}",
        "EACH: one client's tokens/s after its first token",
    ]
    if with_cached:
        words.append("CACHED: prompt tokens found in the KV cache")
    return [*words, f"threads: {request.load.threads}" if request.load else f"server: {request.server}"]


def prompts(outcome: LoadOutcome) -> str:
    """Return the length of the prompts; not every server reports it."""
    tokens = outcome.rows[-1].prompt_tokens
    return f"prompts of {tokens:,} tokens" if tokens else f"prompts of about {PROMPT_TOKENS} tokens"


def early(request: LoadRequest, outcome: LoadOutcome) -> str:
    """Return a note about answers that ended early; "" if there are none."""
    total = sum(row.clients * len(row.samples_ts) for row in outcome.rows)
    n_early = sum(row.early for row in outcome.rows)
    return f"{n_early:,} of {counted(total, 'answer')} ended before {request.tokens} tokens" if n_early else ""


def _show_chart(output: Output, outcome: LoadOutcome) -> None:
    """Print tokens/s against the number of clients, and the knee, if there are enough rows for one."""
    found = [knee for _, knee in knees(outcome)]
    if len({row.clients for row in outcome.rows}) < LEAST_FOR_A_KNEE:
        return
    fastest = max(row.avg_ts for row in outcome.rows)
    rows = sorted(outcome.rows, key=lambda row: (row.shares_prompt, row.clients))
    cells = [
        (
            str(row.clients),
            "shared" if row.shares_prompt else "own",
            bar(row.avg_ts / fastest, _BAR_CELLS) if fastest else "",
            f"{_short(row.answer_p50_ns / 1e9, 2)} s",
            "◀ knee" if row in found else "",
        )
        for row in rows
    ]
    output.text("")
    show_table(output, _CHART, cells)
    output.sentence(KNEE if any(found) else f"ANSWER: {_ANSWER}; no knee: more clients gain more than they cost")


def _cells(row: LoadRow, with_cached: bool) -> tuple[str, ...]:
    first = "/".join(_short(ns / 1e9, 2) for ns in (row.ttft_p50_ns, row.ttft_p95_ns))
    gaps = "/".join(_short(ns / 1e6, 1) for ns in (row.token_p50_ns, row.token_p95_ns, row.token_p99_ns))
    return (
        str(row.clients),
        "shared" if row.shares_prompt else "own",
        f"{row.avg_ts:,.1f} ± {row.stddev_ts:,.1f}",
        f"{row.client_ts:,.1f}",
        f"{first} s",
        f"{gaps} ms",
        *((f"{row.cached_share:.0%}",) if with_cached else ()),
    )


def _short(value: float, decimals: int) -> str:
    """Return a number with about three digits, so that several fit into a cell."""
    return f"{value:.{decimals if value < 10 else 1 if value < 100 else 0}f}"


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
        charts=_page_charts(outcome.rows),
        plots=_plots(outcome),
        place=_place_facts(request, machine),
    )


def _name(row: LoadRow) -> str:
    return LoadCase(row.clients, row.shares_prompt).name


def _warnings(request: LoadRequest, outcome: LoadOutcome) -> list[str]:
    texts = [f"{_name(row)}: {each.text}" for row in outcome.rows for each in sample_warnings(row.samples_ts)]
    return [
        *texts,
        *(f"meanwhile {warning.text}" for warning in outcome.warnings),
        *filter(None, [early(request, outcome)]),
    ]


def _page_charts(rows: Sequence[LoadRow]) -> list[tuple[str, str, list[Bar]]]:
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


def _place_facts(request: LoadRequest, machine: Machine) -> list[tuple[str, str]]:
    if request.load is None:
        return [("Server", request.server), ("Model", request.model)]
    loaded = [("Threads", str(request.load.threads)), ("Context", f"{request.load.n_ctx:,} tokens for each client")]
    return [*machine_facts(machine), *loaded]


_GAIN_COLUMNS = (Column("KIND"), *right("OFF", "ON"), Column("GAIN"), *right("EXPECTED", "ACCEPTED", "A STEP"))


def show_gains(output: Output, name: str, load: Load, outcome: SpeculationOutcome, machine: str) -> None:
    """Print the rows on stdout, and warnings on stderr.

    Args:
        name: of the model.
        machine: the user's name for this machine; "" for its own name.
    """
    if output.json:
        output.result_json(gains_as_json(name, load, outcome, machine))
    else:
        show_table(output, _GAIN_COLUMNS, list(map(_gain_cells, outcome.rows)))
        output.sentence(_gain_summary(outcome))
    for row in outcome.rows:
        if row.verdict.kind == "noisy":
            output.note(f"{row.kind}: {row.verdict.words}, {row.verdict.why}")
        if not row.is_same and row.acceptance is not None:
            output.note(f"{row.kind}: the answers differ, because decode steps of other widths round differently")
    for warning in outcome.warnings:
        output.note(f"meanwhile {warning.text}")
    if outcome.error is not None:
        output.note("stopped before the end")


def gains_as_json(name: str, load: Load, outcome: SpeculationOutcome, machine: str) -> dict[str, Any]:
    """Return the whole outcome as JSON data."""
    return {
        "model": name,
        "version": llmrun.__version__,
        "threads": load.threads,
        "n_ctx": load.n_ctx,
        "is_partial": outcome.error is not None,
        "mean_gain": outcome.mean_gain,
        "rows": [as_dict(row) for row in outcome.rows],
        "warnings": [warning._asdict() for warning in outcome.warnings],
        "machine": as_dict(describe(name=machine)),
    }


def _gain_summary(outcome: SpeculationOutcome) -> str:
    parts = ["decode tokens/s without drafts and with, A STEP: tokens"]
    parts += [f"all but free text: ×{outcome.mean_gain:.2f}, the geometric mean"] if outcome.mean_gain else []
    return "; ".join(parts)


def _gain_cells(row: SpeculationRow) -> tuple[str, ...]:
    return (
        row.kind,
        f"{fmean(row.plain_ts):,.1f}",
        f"{fmean(row.drafted_ts):,.1f}",
        times(row.verdict),
        "-" if row.expected is None else f"×{row.expected:.2f}",
        "-" if row.acceptance is None else f"{row.acceptance:.0%}",
        f"{row.tokens_a_step:.1f}",
    )

"""The output of `llmrun bench --clients`: a table and a small chart, or JSON.

Owns columns and words; must not know how anything is measured.
"""

from __future__ import annotations

from typing import Any

import llmrun
from llmrun.bench.load import LEAST_FOR_A_KNEE, PROMPT_TOKENS, LoadCase, LoadOutcome, LoadRequest, LoadRow
from llmrun.bench.machine import describe, sample_warnings
from llmrun.protocol.codec import as_dict
from llmrun.ui.terminal.format import bar, counted
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

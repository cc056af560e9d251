"""What `llmrun bench --clients` shows: a table, and as JSON everything behind it.

Owns columns and words; must not know how anything is measured.
"""

from __future__ import annotations

from typing import Any

import llmrun
from llmrun.bench.load import LoadCase, LoadOutcome, LoadRequest, LoadRow
from llmrun.bench.machine import describe
from llmrun.bench.noise import sample_warnings
from llmrun.protocol.codec import as_dict
from llmrun.ui.terminal.format import counted
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, show_table

_COLUMNS = (
    Column("CLIENTS", right=True),
    Column("PROMPT"),
    Column("TOKENS/S", right=True),
    Column("EACH", right=True),
    Column("TTFT P50/95", right=True),
    Column("ITL P50/95/99", right=True),
    Column("CACHED", right=True),
)


def show_outcome(output: Output, request: LoadRequest, outcome: LoadOutcome, machine: str) -> None:
    """The rows on stdout, and on stderr what makes them doubtful.

    Args:
        machine: what the user calls this one; "" is its own name.
    """
    if output.json:
        output.result_json(as_json(request, outcome, machine))
    else:
        show_table(output, _COLUMNS, list(map(_cells, outcome.rows)))
        output.sentence(
            f"prompts of {outcome.rows[-1].prompt_tokens:,} tokens, answers of {request.tokens:,}; EACH: one client's "
            f"tokens/s behind its first token; CACHED: prompt tokens found in the KV cache; "
            f"threads: {request.load.threads}"
        )
    for row in outcome.rows:
        for warning in sample_warnings(row.samples_ts):
            output.note(f"{LoadCase(row.clients, row.shares_prompt).name}: {warning.text}")
    for warning in outcome.warnings:
        output.note(f"meanwhile {warning.text}")
    if outcome.error is not None:
        complete = sum(len(row.samples_ts) == request.repetitions for row in outcome.rows)
        output.note(f"stopped before the end: {complete} of {counted(len(request.cases), 'row')} complete")


def as_json(request: LoadRequest, outcome: LoadOutcome, machine: str) -> dict[str, Any]:
    """Everything, as JSON data."""
    return {
        "model": request.model,
        "version": llmrun.__version__,
        "tokens": request.tokens,
        "repetitions": request.repetitions,
        "threads": request.load.threads,
        "n_ctx": request.load.n_ctx,
        "is_partial": outcome.error is not None,
        "rows": [as_dict(row) for row in outcome.rows],
        "warnings": [warning._asdict() for warning in outcome.warnings],
        "machine": as_dict(describe(name=machine)),
    }


def _cells(row: LoadRow) -> tuple[str, ...]:
    first = "/".join(_short(ns / 1e9, 2) for ns in (row.ttft_p50_ns, row.ttft_p95_ns))
    gaps = "/".join(_short(ns / 1e6, 1) for ns in (row.token_p50_ns, row.token_p95_ns, row.token_p99_ns))
    return (
        str(row.clients),
        "shared" if row.shares_prompt else "own",
        f"{row.avg_ts:,.1f} ± {row.stddev_ts:,.1f}",
        f"{row.client_ts:,.1f}",
        f"{first} s",
        f"{gaps} ms",
        f"{row.cached_share:.0%}",
    )


def _short(value: float, decimals: int) -> str:
    """Three digits, so that several fit into a cell; more where they stand before the point."""
    return f"{value:.{decimals if value < 10 else 1 if value < 100 else 0}f}"

"""The output of `llmrun bench --speculate`: a table, or JSON.

Owns columns and words; must not know how anything is measured.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import llmrun
from llmrun.bench.machine import describe
from llmrun.bench.speculation import SpeculationOutcome, SpeculationRow
from llmrun.protocol.codec import as_dict
from llmrun.protocol.loading import Load
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, right, show_table
from llmrun.ui.views.tune import step_words, times

_COLUMNS = (Column("KIND"), *right("OFF", "ON"), Column("GAIN"), *right("EXPECTED", "ACCEPTED", "A STEP"))


def show_outcome(output: Output, name: str, load: Load, outcome: SpeculationOutcome, machine: str) -> None:
    """Print the rows on stdout, and warnings on stderr.

    Args:
        name: of the model.
        machine: the user's name for this machine; "" for its own name.
    """
    if output.json:
        output.result_json(as_json(name, load, outcome, machine))
    else:
        show_table(output, _COLUMNS, list(map(_cells, outcome.rows)))
        output.sentence(_summary(outcome))
    for row in outcome.rows:
        if row.verdict.kind == "noisy":
            output.note(f"{row.kind}: {row.verdict.words}, {row.verdict.why}")
        if not row.is_same and row.acceptance is not None:
            output.note(f"{row.kind}: the answers differ, because decode steps of other widths round differently")
    for warning in outcome.warnings:
        output.note(f"meanwhile {warning.text}")
    if outcome.error is not None:
        output.note("stopped before the end")


def as_json(name: str, load: Load, outcome: SpeculationOutcome, machine: str) -> dict[str, Any]:
    """Return the whole outcome as JSON data."""
    return {
        "model": name,
        "version": llmrun.__version__,
        "threads": load.threads,
        "n_ctx": load.n_ctx,
        "is_partial": outcome.error is not None,
        "step_times": [each._asdict() for each in outcome.times],
        "mean_gain": outcome.mean_gain,
        "rows": [as_dict(row) for row in outcome.rows],
        "warnings": [warning._asdict() for warning in outcome.warnings],
        "machine": as_dict(describe(name=machine)),
    }


def _summary(outcome: SpeculationOutcome) -> str:
    parts = ["decode tokens/s without drafts and with, A STEP: tokens"]
    parts += [f"all but free text: ×{outcome.mean_gain:.2f}, the geometric mean"] if outcome.mean_gain else []
    parts += (
        [step_words(outcome.times)] if outcome.times else ["no step times could be measured, so nothing is drafted"]
    )
    return "; ".join(parts)


def _cells(row: SpeculationRow) -> tuple[str, ...]:
    return (
        row.kind,
        f"{fmean(row.plain_ts):,.1f}",
        f"{fmean(row.drafted_ts):,.1f}",
        times(row.verdict),
        "-" if row.expected is None else f"×{row.expected:.2f}",
        "-" if row.acceptance is None else f"{row.acceptance:.0%}",
        f"{row.tokens_a_step:.1f}",
    )

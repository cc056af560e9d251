"""The list of earlier bench results, and two results side by side with a verdict.

Must not know how verdicts are computed. Names of models and machines are untrusted text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from llmrun.bench.compare import Comparison, Pair
from llmrun.bench.external import ExternalComparison
from llmrun.bench.history import HistoryEntry
from llmrun.bench.results import Result
from llmrun.bench.significance import Verdict
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, ago, right, show_table
from llmrun.ui.views.bench import details, disturbances, limit_text
from llmrun.ui.views.bench_labels import labels


def show_entries(output: Output, entries: Sequence[HistoryEntry]) -> None:
    """Print the history on stdout, the newest result first."""
    columns = (
        Column("NUMBER", right=True, style="bold"),
        Column("WHEN"),
        Column("MODELS"),
        Column("TESTS"),
        Column("MACHINE", style="dim"),
        Column("FROM", style="dim"),
    )
    now = time.time()
    rows = [
        (str(each.number), ago(now - each.time), ", ".join(each.models), each.tests, each.machine, each.origin)
        for each in entries
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

"""A bench result as an HTML page. Owns which rows are in which chart; bench.html.jinja has the layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from llmrun.bench.results import BenchRow, Machine, Result
from llmrun.bench.significance import interval
from llmrun.protocol.sizes import readable_size
from llmrun.ui.html.charts import Bar, drawable_bars
from llmrun.ui.html.render import render
from llmrun.ui.terminal.format import rate
from llmrun.ui.views.bench_labels import labels, model_name
from llmrun.ui.views.machine_facts import machine_facts

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
    prefill = [each for each in rows if each.row.n_gen == 0]
    decode = [each for each in rows if each.row.n_prompt == 0 and each.row.n_gen]
    both = [each for each in rows if each.row.n_prompt and each.row.n_gen]
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

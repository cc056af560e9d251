"""The report card as an HTML page: the plot of size, quality and speed, the table, and how it was measured.

Owns what is in which chart; report.html.jinja has the layout and report_text.py the texts.
"""

from __future__ import annotations

from typing import Any

from llmrun.protocol.sizes import readable_size
from llmrun.quantize.card import Card, CardRow, beaten_by, front, iso_time, praise, recommended
from llmrun.ui.html.charts import Bar, Dot, drawable_bars, scatter
from llmrun.ui.html.render import render
from llmrun.ui.terminal.format import rate, seconds
from llmrun.ui.views.machine_facts import machine_facts
from llmrun.ui.views.report_text import decode_words, headings, how, legend, lines, notes, unit_of, wall, with_error

_NAMES = {
    "TYPE": "Type",
    "BITS": "Bits",
    "PREFILL": "Prefill tokens/s",
    "DECODE": "Decode tokens/s",
    "VERDICT": "Verdict",
}
_CLASSES = {"TYPE": "", "VERDICT": "w"}


def report_page(card: Card) -> str:
    """Return the page of a card."""
    cpu, best, source = card.machine.cpu, recommended(card.rows), card.source_row
    names = {name: _NAMES.get(name, name.replace("SIZE", "Size").replace("SAME", "Same")) for name in headings(card)}
    has_plot = any(row.quality.kld is not None and row.n_bytes for row in card.rows)
    return render(
        "report",
        title=f"{card.name}, quantized",
        lead=wall(card) or f"Types of {card.name}, made and measured side by side{f' on {cpu}' if cpu else ''}.",
        best=_tiles(best, source) if best and source else [],
        plot=_plot(card) if has_plot else None,
        has_beaten=any(beaten_by(row, card.rows) for row in card.rows if not row.is_source),
        is_complete=card.is_complete,
        columns={shown: _CLASSES.get(name, "n") for name, shown in names.items()},
        rows=_rows(card, best),
        legend=legend(),
        charts=_charts(card),
        method=how(card),
        place=[
            *machine_facts(card.machine),
            ("Started", iso_time(card.started)),
            ("Took", seconds(card.seconds)),
            ("Source", card.source),
        ],
        notes=notes(card),
    )


def _tiles(best: CardRow, source: CardRow) -> list[tuple[str, str]]:
    tiles = [(best.type, f"{praise(best)} here")]
    if best.n_bytes and source.n_bytes:
        times = source.n_bytes / best.n_bytes
        tiles.append((readable_size(best.n_bytes), f"of {readable_size(source.n_bytes)}: {times:.1f}x smaller"))
    if best.decode.median and source.decode.median:
        pace = decode_words(best, source)
        than = f"as fast as {source.type}" if pace == "equally fast" else f"{pace} than {source.type}"
        tiles.append((rate(best.decode.median, whole=True), f"decode, {than}"))
    if best.quality.kld is not None:
        tiles.append((with_error(best.quality.kld, None), "nats of KL divergence from the source"))
    if best.quality.same_top is not None:
        tiles.append((f"{best.quality.same_top:.1%}", "of the most likely tokens are the same"))
    return tiles


def _plot(card: Card) -> dict[str, Any]:
    unit, n_bytes = unit_of(card)
    in_front = {id(row) for row in front(card.rows)}
    dots = []
    for row in card.rows:
        if not row.n_bytes or (row.quality.kld is None and not row.is_source):
            continue
        speed, same = row.decode.median, row.quality.same_top
        kind = "origin" if row.is_source else "beaten" if beaten_by(row, card.rows) else "front"
        note = f"{row.bits_per_weight or 0:.2f} bits per weight" if same is None else f"same top token {same:.1%}"
        caption, joined = rate(speed, whole=True) if speed else "", id(row) in in_front
        size, kld = row.n_bytes / n_bytes, row.quality.kld or 0.0
        dots.append(Dot(row.type, size, kld, caption, speed or 0.0, kind, note, joined))
    y_axis = ("KL divergence from the source, in nats: lower is better", "")
    return scatter("Size, quality and speed", dots, ("size", unit), y_axis)


def _rows(card: Card, best: CardRow | None) -> list[dict[str, Any]]:
    """Return each type's texts, with the value that its column is sorted by and the share that a bar shows."""
    fastest = max((row.decode.median or 0.0 for row in card.rows), default=0.0)
    rows = []
    for row, (kind, *texts, verdict) in zip(card.rows, lines(card), strict=True):
        kld, same = (0.0, 1.0) if row.is_source else (row.quality.kld, row.quality.same_top)
        decode = row.decode.median
        values = (row.n_bytes, row.bits_per_weight, row.prefill.median, decode, row.peak_memory, kld, same)
        shares = (None, None, None, decode / fastest if decode and fastest else None, None, None, None, None)
        cells = list(zip(texts, (*values, row.quality.perplexity), shares, strict=True))
        rows.append({"type": kind, "cells": cells, "verdict": verdict, "is_marked": row is best})
    return rows


def _charts(card: Card) -> list[tuple[str, list[Bar]]]:
    decode, prefill = [
        [
            Bar(row.type, speed.median, speed.low, speed.high, speed.samples, dull=row.is_source)
            for row, speed in zip(card.rows, speeds, strict=True)
            if speed.median is not None
        ]
        for speeds in ([row.decode for row in card.rows], [row.prefill for row in card.rows])
    ]
    charts = (("Decode: writing an answer", decode), ("Prefill: reading a prompt", prefill))
    return [(title, shown) for title, bars in charts if (shown := drawable_bars(bars))]

"""The report card as one HTML page: the chart of size, quality and speed, the table, and how it was measured."""

from __future__ import annotations

from llmrun.protocol.sizes import readable_size
from llmrun.quantize.report.card import Card, CardRow, iso_time
from llmrun.quantize.report.verdict import beaten_by, front, praise, recommended
from llmrun.ui.html.markup import Markup
from llmrun.ui.html.page import Cell, FactList, Figure, Paragraph, Part, Section, Table, Tiles, page
from llmrun.ui.html.plot_frame import Axis
from llmrun.ui.html.plots import Bar, Dot, bar_chart, dot_chart
from llmrun.ui.terminal.format import rate, seconds
from llmrun.ui.views.machine_facts import machine_facts
from llmrun.ui.views.report_text import decode_words, headings, how, legend, lines, notes, unit_of, wall, with_error

_NAMES = {"TYPE": "Type", "BITS": "Bits", "PREFILL": "Prefill t/s", "DECODE": "Decode t/s", "VERDICT": "Verdict"}


def report_page(card: Card) -> str:
    """The whole page."""
    machine = card.machine.cpu
    sections = [
        Section("", tuple(_first(card))),
        Section("All figures", (_table(card), FactList(tuple(legend())))),
        Section("Speed", tuple(_speeds(card))),
        Section("How it was measured", tuple(_method(card))),
    ]
    lead = wall(card) or f"Types of {card.name}, made and measured side by side{f' on {machine}' if machine else ''}."
    return page(f"{card.name}, quantized", [section for section in sections if section.parts], lead=lead)


def _first(card: Card) -> list[Part]:
    parts: list[Part] = []
    best, source = recommended(card.rows), card.source_row
    if best is not None and source is not None:
        parts.append(_tiles(best, source))
    if any(row.quality.kld is not None and row.n_bytes for row in card.rows):
        parts.append(Figure(_chart(card), _caption(card)))
    if not card.is_complete:
        parts.append(Paragraph("The report was stopped before its end: what has a dash was not measured."))
    return parts


def _tiles(best: CardRow, source: CardRow) -> Tiles:
    tiles = [(best.type, f"{praise(best)} here")]
    if best.n_bytes and source.n_bytes:
        tiles.append(
            (
                readable_size(best.n_bytes),
                f"of {readable_size(source.n_bytes)}: {source.n_bytes / best.n_bytes:.1f}x smaller",
            )
        )
    if best.decode.median and source.decode.median:
        pace = decode_words(best, source)
        than = f"as fast as {source.type}" if pace == "equally fast" else f"{pace} than {source.type}"
        tiles.append((rate(best.decode.median, whole=True), f"decode, {than}"))
    if best.quality.kld is not None:
        tiles.append((with_error(best.quality.kld, None), "nats of KL divergence from the source"))
    if best.quality.same_top is not None:
        tiles.append((f"{best.quality.same_top:.1%}", "of the most likely tokens are the same"))
    return Tiles(tuple(tiles))


def _chart(card: Card) -> Markup:
    unit, n_bytes = unit_of(card)
    rows = [row for row in card.rows if row.n_bytes and (row.is_source or row.quality.kld is not None)]
    in_front = {id(row) for row in front(card.rows)}
    dots = [
        Dot(
            row.type,
            (row.n_bytes or 0) / n_bytes,
            row.quality.kld or 0.0,
            rate(row.decode.median, whole=True) if row.decode.median else "",
            row.decode.median or 0.0,
            "origin" if row.is_source else "beaten" if beaten_by(row, card.rows) else "front",
            _note(row),
            id(row) in in_front,
        )
        for row in rows
    ]
    y = Axis("KL divergence from the source, in nats: lower is better")
    return dot_chart(dots, Axis("size", unit), y, "Size, quality and speed")


def _note(row: CardRow) -> str:
    quality = row.quality
    same = f"same top token {quality.same_top:.1%}" if quality.same_top is not None else ""
    return same or f"{row.bits_per_weight or 0:.2f} bits per weight"


def _caption(card: Card) -> str:
    said = (
        "A disc's area and the number below its name are its decode speed. The dashed line joins the types that no "
        "other is both smaller and more exact than."
    )
    if any(beaten_by(row, card.rows) for row in card.rows if not row.is_source):
        said += " Grey ones are beaten: another type is better at something and worse at nothing."
    return said


def _table(card: Card) -> Table:
    most = max((row.decode.median or 0.0 for row in card.rows), default=0.0)
    best = recommended(card.rows)
    rows = []
    for row, line in zip(card.rows, lines(card), strict=True):
        quality = row.quality
        values = (
            None, row.n_bytes, row.bits_per_weight, row.prefill.median, row.decode.median, row.peak_memory,
            0.0 if row.is_source else quality.kld, 1.0 if row.is_source else quality.same_top, quality.perplexity, None,
        )  # fmt: skip
        share = row.decode.median / most if row.decode.median and most else None
        cells = [Cell(text, value) for text, value in zip(line.cells, values, strict=True)]
        cells[4] = Cell(cells[4].text, cells[4].value, share)
        rows.append(tuple(cells))
    names = tuple(_NAMES.get(name, name.replace("SIZE", "Size").replace("SAME", "Same")) for name in headings(card))
    marked = next((index for index, row in enumerate(card.rows) if row is best), None)
    return Table(
        names,
        tuple(rows),
        frozenset(range(1, 9)),
        frozenset({9}),
        marked,
        "± is a 95 % interval. Click a heading to sort.",
    )


def _speeds(card: Card) -> list[Part]:
    parts: list[Part] = []
    for name, words in (("decode", "Decode: writing an answer"), ("prefill", "Prefill: reading a prompt")):
        bars = [
            Bar(row.type, speed.median, speed.low, speed.high, speed.samples, dull=row.is_source)
            for row in card.rows
            for speed in (getattr(row, name),)
            if speed.median is not None
        ]
        if bars:
            parts.append(Figure(bar_chart(bars, Axis("", "t/s"), words)))
    if parts:
        parts.append(Paragraph("Bars are medians; whiskers and dots are the single rounds.", small=True))
    return parts


def _method(card: Card) -> list[Part]:
    facts = [
        *machine_facts(card.machine),
        ("Started", iso_time(card.started)),
        ("Took", seconds(card.seconds)),
        ("Source", card.source),
    ]
    parts: list[Part] = [Paragraph(" ".join(how(card))), FactList(tuple(facts))]
    return parts + [Paragraph(note, small=True) for note in notes(card)]

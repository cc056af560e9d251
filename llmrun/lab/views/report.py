"""The result of `llmrun report`: its sentences, as table, Markdown, JSON or page, and the progress of its making.

report.html.jinja has the layout of the page.
"""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmrun.errors import CancelledError, UsageError
from llmrun.lab.bench.formats import escape, markdown_table
from llmrun.lab.html.render import Bar, Dot, drawable_bars, render, scatter
from llmrun.lab.quantize.card import (
    Card,
    CardRow,
    CardSpeed,
    beaten_by,
    compare,
    front,
    iso_time,
    praise,
    recommended,
    to_json,
    verdicts,
)
from llmrun.lab.quantize.report import ReportUpdate
from llmrun.lab.views.bench import machine_facts
from llmrun.protocol.sizes import readable_size
from llmrun.storage import check_target, write_whole
from llmrun.ui.terminal.activity import Activity, time_left
from llmrun.ui.terminal.cells import width
from llmrun.ui.terminal.format import counted, rate, seconds
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, show_table

NONE = "–"  # not measured
_QUIET_SPREAD = 1.3  # fastest round to slowest round of a quiet machine


def unit_of(card: Card) -> tuple[str, float]:
    """Return the unit of sizes for the largest file, and its number of bytes."""
    largest = max((row.n_bytes or 0 for row in card.rows), default=0)
    return ("GB", 1e9) if largest >= 10e9 else ("MB", 1e6)


def headings(card: Card) -> tuple[str, ...]:
    """Return the headings of the columns, short enough for 80 cells."""
    unit = unit_of(card)[0]
    return ("TYPE", f"SIZE {unit}", "BITS", "PREFILL", "DECODE", f"RAM {unit}", "KLD", "SAME %", "PPL", "VERDICT")


def lines(card: Card) -> list[tuple[str, ...]]:
    """Return each type's cells, in the order of headings()."""
    bytes_of = unit_of(card)[1]
    return [_line(row, verdict, bytes_of) for row, verdict in zip(card.rows, verdicts(card.rows), strict=True)]


def _line(row: CardRow, verdict: str, unit: float) -> tuple[str, ...]:
    quality = row.quality
    return (
        row.type,
        fixed(row.n_bytes, unit, 1),
        fixed(row.bits_per_weight, 1, 2),
        speed(row.prefill.median),
        speed(row.decode.median),
        fixed(row.peak_memory, unit, 0 if unit == 1e6 else 1),
        "0" if row.is_source else with_error(quality.kld, quality.kld_error),
        "100" if row.is_source else fixed(quality.same_top, 0.01, 1),
        fixed(quality.perplexity, 1, 2),
        verdict,
    )


def fixed(value: float | None, unit: float, decimals: int) -> str:
    """Return a number in a unit, or a dash."""
    return NONE if value is None or not math.isfinite(value) else f"{value / unit:,.{decimals}f}"


def speed(value: float | None) -> str:
    """Return tokens/s with three digits, or a dash."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def with_error(value: float | None, error: float | None) -> str:
    """Return a number with the digits that its error allows, e.g. "0.031 ± 0.002"."""
    if value is None or not math.isfinite(value):
        return NONE
    if error is None or not math.isfinite(error) or error <= 0:
        return f"{value:.4f}" if abs(value) < 0.01 else f"{value:.3f}"
    decimals = min(max(-math.floor(math.log10(error)), 3 if value < 1 else 2), 4)
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def wall(card: Card) -> str:
    """Return the gains and the loss of the recommended type in one line; "" without such a type."""
    best, source = recommended(card.rows), card.source_row
    if best is None or source is None or not source.n_bytes or not best.n_bytes:
        return ""
    pace = decode_words(best, source)
    parts = [f"{pace} decode" if pace else "", f"KLD {with_error(best.quality.kld, None)}"]
    changes = ", ".join(filter(None, parts))
    return f"{source.type} {readable_size(source.n_bytes)} → {best.type} {readable_size(best.n_bytes)}: {changes}"


def decode_words(row: CardRow, other: CardRow) -> str:
    """Return a comparison of decode speeds, e.g. "2.0x faster"; "" unless both were measured."""
    if not row.decode.median or not other.decode.median:
        return ""
    ratio = row.decode.median / other.decode.median
    if compare(row, other).faster:
        return f"{ratio:.1f}x faster"
    return f"{1 / ratio:.1f}x slower" if compare(other, row).faster else "equally fast"


def how(card: Card) -> list[str]:
    """Return sentences about the method."""
    method = card.method
    sentences = [
        f"Speed: prompts of {method.prompt_tokens} tokens and answers of {method.answer_tokens}, "
        f"{counted(method.threads, 'thread')}, the median "
        f"of {method.rounds} rounds in which all types take turns."
    ]
    if method.n_tokens:
        sentences.append(f"Quality: {method.n_tokens:,} tokens of {method.text}, read side by side with the source.")
    if method.imatrix:
        sentences.append(f"Importance matrix: {method.imatrix}.")
    sentences.append("Memory: peak resident memory of the engine process, file pages included.")
    return sentences


def legend() -> list[tuple[str, str]]:
    """Return the meaning of each column."""
    return [
        ("bits", "per weight, scales included"),
        ("prefill, decode", "tokens/s of reading a prompt, and of generating an answer"),
        (
            "KLD",
            "Kullback-Leibler divergence of the next token's probabilities from the source's, in nats; 0 is identical",
        ),
        ("same %", "share of positions with the same most likely token"),
        ("PPL", "perplexity on the text; only its difference to the source's is meaningful"),
    ]


def notes(card: Card) -> list[str]:
    """Return notes and warnings."""
    texts = list(card.notes)
    texts += [f"{row.type}: {note}" for row in card.rows for note in row.notes if note not in card.notes]
    spread = max((_spread(speed) for row in card.rows for speed in (row.prefill, row.decode)), default=1.0)
    if spread > _QUIET_SPREAD:
        texts.append(
            f"the machine was busy: the same speed was up to {spread:.1f}x higher in one round than in another, so "
            "only large differences are visible; measure again on a quiet machine"
        )
    if not card.is_complete:
        texts.append("stopped before the end: a dash is not measured, and speeds are of fewer rounds")
    return texts


def _spread(speed: CardSpeed) -> float:
    return speed.high / speed.low if speed.low and speed.high else 1.0


def finished(row: CardRow) -> str:
    """Return the known figures of a type in one line, while the report runs."""
    if row.failure:
        return f"{row.type}: {row.failure}"
    parts = [readable_size(row.n_bytes)] if row.n_bytes else []
    if row.quality.kld is not None and not row.is_source:
        parts.append(f"KLD {with_error(row.quality.kld, None)}")
    if row.decode.median:
        parts.append(f"decode {rate(row.decode.median)}")
    return f"{row.type}: {', '.join(parts)}"


def took(card: Card) -> str:
    """Return the start and the duration, e.g. "2026-11-21 10:04, 3 min 12 s"."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(card.started))
    return f"{when}, {seconds(card.seconds)}"


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


FORMATS = (".md", ".json", ".html")
"""Suffixes of files for cards."""

_DOING = {"quantizing": "quantizing", "judging": "measuring quality", "timing": "measuring speed"}
_GAP = 2


def checked_target(path: Path, label: str = "report file") -> Path:
    """Return a path for a card; check it before hours of measuring.

    Raises:
        UsageError: the suffix names no format, or the folder does not exist.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(
            f"invalid {label} {str(path)!r}",
            why="the suffix must name the format",
            hint=f"use one of {', '.join(path.stem + suffix for suffix in FORMATS)}",
        )
    check_target(path)
    return path


def write(card: Card, path: Path) -> None:
    """Write a card in the format of the file's suffix. An existing file is replaced once the new one is complete.

    Raises:
        UsageError: the suffix names no format.
        ResourceError: the file can't be written.
    """
    suffix = checked_target(path).suffix.lower()
    text = report_page(card) if suffix == ".html" else markdown(card) if suffix == ".md" else json_text(card)
    write_whole(path, text)


def show(output: Output, card: Card) -> None:
    """Print a card on stdout as a table or JSON, and the method on stderr.

    Raises:
        CancelledError: after the output, if the user stopped the report: the exit status should tell.
    """
    if output.json:
        output.result_json(_data(card))
    else:
        line = wall(card)
        if line:
            output.sentence(line)
            output.text("")
        _show_table(output, card)
        _show_notes(output, [*how(card), *notes(card)])
    if not card.is_complete:
        raise CancelledError("the report was stopped")


def json_text(card: Card) -> str:
    """Return a card as a JSON document."""
    return json.dumps(_data(card), ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def _data(card: Card) -> dict[str, Any]:
    best = recommended(card.rows)
    return to_json(card, verdicts(card.rows), best.type if best else "")


# ---- terminal


def _show_table(output: Output, card: Card) -> None:
    """Print the table; on a narrow terminal the verdicts are below it."""
    rows = lines(card)
    columns = [Column(name, right=name not in ("TYPE", "VERDICT")) for name in headings(card)]
    columns[0] = Column("TYPE", style="bold")
    widths = [max(width(clean(row[i])) for row in (headings(card), *rows)) for i in range(len(columns))]
    if not 0 < output.columns() < sum(widths) + _GAP * len(widths):
        show_table(output, columns, rows)
        return
    show_table(output, columns[:-1], [row[:-1] for row in rows])
    output.text("")
    for row in rows:
        _show_verdict(output, row[0], row[-1], widths[0])


def _show_notes(output: Output, sentences: Sequence[str]) -> None:
    """Print notes on stderr, with an empty line before them on a terminal."""
    for sentence in [""] * output.stderr_is_terminal + [*sentences]:
        output.note(sentence)


def _show_verdict(output: Output, kind: str, words: str, indent: int) -> None:
    kind, bold, plain = clean(kind), *(("\x1b[1m", "\x1b[0m") if output.stdout_has_color else ("", ""))
    room = max((output.columns() or 80) - indent - _GAP, 20)
    first, *more = textwrap.wrap(clean(words), room) or [""]
    output.text(f"{bold}{kind}{plain}{' ' * (indent - width(kind) + _GAP)}{first}")
    for line in more:
        output.text(" " * (indent + _GAP) + line)


# ---- Markdown


def markdown(card: Card) -> str:
    """Return a card as Markdown with an aligned table."""
    parts = [f"# {_markdown_text(card.name)}: quantized"]
    line = wall(card)
    if line:
        parts.append(f"**{_markdown_text(line)}**")
    parts.append(_markdown_table(card))
    parts.append("\n".join(f"- **{name}**: {meaning}" for name, meaning in legend()))
    parts.append("## How it was measured")
    parts.append("\n".join(f"- {_markdown_text(sentence)}" for sentence in how(card)))
    facts = [*machine_facts(card.machine), ("Measured", took(card)), ("Source", card.source)]
    parts.append("\n".join(f"- {_markdown_text(name)}: {_markdown_text(value)}" for name, value in facts))
    if notes(card):
        parts += ["## Notes", "\n".join(f"- {_markdown_text(note)}" for note in notes(card))]
    return "\n\n".join(parts) + "\n"


def _markdown_table(card: Card) -> str:
    names = [name.capitalize() if name not in ("KLD", "PPL") else name for name in headings(card)]
    names = [name.replace(" mb", " (MB)").replace(" gb", " (GB)").replace("Ram", "RAM") for name in names]
    names = [f"{name} (tokens/s)" if name in ("Prefill", "Decode") else name for name in names]
    return markdown_table(names, [[clean(cell) for cell in line] for line in lines(card)], ("Type", "Verdict"))


def _markdown_text(text: str) -> str:
    return escape(clean(text))


# ---- progress


@contextmanager
def report_progress(
    output: Output, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[ReportUpdate], None]]:
    """Show the progress of a report until the end of the block, and a line for each type once its speed is known.

    Args:
        clock: monotonic seconds.
    """
    reported: set[str] = set()
    with Activity(output, clock=clock) as activity:

        def show(update: ReportUpdate) -> None:
            row = update.row
            if row is not None and row.type not in reported and (row.failure or update.doing == "timing"):
                reported.add(row.type)
                activity.note(finished(row))
            doing = f"{clean(update.type)}: {_DOING.get(update.doing, update.doing)}"
            activity.show(doing, update.share, time_left(update.seconds_left))

        yield show

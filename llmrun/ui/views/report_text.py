"""The words and cells of a report card, the same on a terminal, in Markdown and on a page.

Owns wording and rounding; must not know the layout.
"""

from __future__ import annotations

import math
import time

from llmrun.protocol.sizes import readable_size
from llmrun.quantize.card import Card, CardRow, CardSpeed, compare, recommended, verdicts
from llmrun.ui.terminal.format import counted, rate, seconds

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

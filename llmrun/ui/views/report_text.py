"""What a report card says, as words and cells: the same in a terminal, in Markdown and on a page.

Owns wording and rounding; must not know the layout.
"""

from __future__ import annotations

import math
import time

from llmrun.protocol.sizes import readable_size
from llmrun.quantize.report.card import Card, CardRow, CardSpeed
from llmrun.quantize.report.verdict import compare, recommended, verdicts
from llmrun.ui.terminal.format import rate, seconds

NONE = "–"
"""Stands for what was not measured."""
_QUIET_SPREAD = 1.3  # of the rounds, fastest to slowest


def unit_of(card: Card) -> tuple[str, float]:
    """The unit for sizes that suits the largest file, and its bytes."""
    most = max((row.n_bytes or 0 for row in card.rows), default=0)
    return ("GB", 1e9) if most >= 10e9 else ("MB", 1e6)


def headings(card: Card) -> tuple[str, ...]:
    """Of the columns, short enough for 80 cells."""
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
    """A number in a unit, or a dash."""
    return NONE if value is None or not math.isfinite(value) else f"{value / unit:,.{decimals}f}"


def speed(value: float | None) -> str:
    """Tokens/s to three digits, or a dash."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def with_error(value: float | None, error: float | None) -> str:
    """A number with as many digits as its error allows, e.g. "0.031 ±0.002"."""
    if value is None or not math.isfinite(value):
        return NONE
    if error is None or not math.isfinite(error) or error <= 0:
        return f"{value:.4f}" if abs(value) < 0.01 else f"{value:.3f}"
    decimals = min(max(-math.floor(math.log10(error)), 3 if value < 1 else 2), 4)
    return f"{value:.{decimals}f} ±{error:.{decimals}f}"


def wall(card: Card) -> str:
    """The memory wall in one line: what the recommended type saves and costs; "" when there is none."""
    best, source = recommended(card.rows), card.source_row
    if best is None or source is None or not source.n_bytes or not best.n_bytes:
        return ""
    pace = decode_words(best, source)
    said = [f"{pace} decode" if pace else "", f"KLD {with_error(best.quality.kld, None)}"]
    changes = ", ".join(filter(None, said))
    return f"{source.type} {readable_size(source.n_bytes)} → {best.type} {readable_size(best.n_bytes)}: {changes}"


def decode_words(row: CardRow, other: CardRow) -> str:
    """How the decode speed of one compares with another's: "2.0x faster"; "" when not both were measured."""
    if not row.decode.median or not other.decode.median:
        return ""
    ratio = row.decode.median / other.decode.median
    if compare(row, other).faster:
        return f"{ratio:.1f}x faster"
    return f"{1 / ratio:.1f}x slower" if compare(other, row).faster else "equally fast"


def how(card: Card) -> list[str]:
    """How it was measured, a sentence each."""
    method = card.method
    threads = f"{method.threads} {'thread' if method.threads == 1 else 'threads'}"
    said = [
        f"Speed: prompts of {method.prompt_tokens} tokens and answers of {method.answer_tokens}, {threads}, the median "
        f"of {method.rounds} rounds in which all types take turns."
    ]
    if method.n_tokens:
        said.append(f"Quality: {method.n_tokens:,} tokens of {method.text}, read side by side with the source.")
    if method.imatrix:
        said.append(f"Importance matrix: {method.imatrix}.")
    said.append("Memory: the most that the engine process had in RAM, file pages included.")
    return said


def legend() -> list[tuple[str, str]]:
    """What the columns mean, for those who want to know."""
    return [
        ("bits", "per weight, scales included"),
        ("prefill, decode", "tokens/s of reading a prompt, and of writing an answer"),
        (
            "KLD",
            "Kullback-Leibler divergence of the next token's probabilities from the source's, in nats; 0 is identical",
        ),
        ("same %", "how often both find the same token most likely"),
        ("PPL", "perplexity on the text; only the difference to the source's tells something"),
    ]


def notes(card: Card) -> list[str]:
    """What else should be known."""
    said = list(card.notes)
    said += [f"{row.type}: {note}" for row in card.rows for note in row.notes if note not in card.notes]
    spread = max((_spread(speed) for row in card.rows for speed in (row.prefill, row.decode)), default=1.0)
    if spread > _QUIET_SPREAD:
        said.append(
            f"the machine was busy: the same speed was up to {spread:.1f}x higher in one round than in another, so "
            "only large differences can be seen; measure again when it is quiet"
        )
    if not card.is_complete:
        said.append("stopped before the end: what has a dash was not measured, and speeds are of fewer rounds")
    return said


def _spread(speed: CardSpeed) -> float:
    return speed.high / speed.low if speed.low and speed.high else 1.0


def finished(row: CardRow) -> str:
    """What is known of a type, in one line, as it is being measured."""
    if row.failure:
        return f"{row.type}: {row.failure}"
    said = [readable_size(row.n_bytes)] if row.n_bytes else []
    if row.quality.kld is not None and not row.is_source:
        said.append(f"KLD {with_error(row.quality.kld, None)}")
    if row.decode.median:
        said.append(f"decode {rate(row.decode.median)}")
    return f"{row.type}: {', '.join(said)}"


def took(card: Card) -> str:
    """When and how long, e.g. "2026-11-21 10:04, 3 min 12 s"."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(card.started))
    return f"{when}, {seconds(card.seconds)}"

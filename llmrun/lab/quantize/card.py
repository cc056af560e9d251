"""The report card as data, also in JSON: measured size, speed and quality of each type, and the rules of verdicts.

A type is beaten if another one is better in some respect and worse in none. Each remaining type is described by its
strengths. Differences within the measurement error are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from statistics import median
from typing import Any

from llmrun import statistics
from llmrun.lab.bench.results import Machine
from llmrun.protocol.codec import as_dict

VERSION = 1
"""Version of the JSON; it increases when a name is removed or changes its meaning."""


@dataclass(frozen=True, slots=True)
class CardSpeed:
    """Tokens/s of several rounds; all types take turns, so that a busy minute slows all of them down."""

    samples: tuple[float, ...] = ()  # one per round

    @property
    def median(self) -> float | None:
        return median(self.samples) if self.samples else None

    @property
    def low(self) -> float | None:
        return min(self.samples, default=None)

    @property
    def high(self) -> float | None:
        return max(self.samples, default=None)


@dataclass(frozen=True, slots=True)
class Quality:
    """Distance of a model's next-token distributions from the source's, on the same text."""

    perplexity: float | None = None
    perplexity_error: float | None = None  # half of the 95 % interval, like the other errors
    kld: float | None = None  # mean Kullback-Leibler divergence from the source, in nats; 0 is identical
    kld_error: float | None = None
    same_top: float | None = None  # share of positions with the same most likely token, 0 to 1
    same_top_error: float | None = None


@dataclass(frozen=True, slots=True)
class CardRow:
    """Type and its figures."""

    type: str  # e.g. "Q4_K_M"
    is_source: bool = False  # the others are made from it, and compared with it
    n_bytes: int | None = None  # of the file(s)
    bits_per_weight: float | None = None  # average over all weights
    prefill: CardSpeed = CardSpeed()
    decode: CardSpeed = CardSpeed()
    peak_memory: int | None = None  # bytes; the largest resident set of the engine process, file pages included
    quality: Quality = Quality()
    seconds: float | None = None  # for quantizing
    path: str = ""  # of the file; "" if removed
    notes: tuple[str, ...] = ()  # for display
    failure: str = ""  # reason why it could not be made or measured; "" for none


@dataclass(frozen=True, slots=True)
class Method:
    """Method of the measurements."""

    text: str = ""  # name of the text for quality
    text_sha256: str = ""  # of the UTF-8 bytes
    n_tokens: int = 0  # evaluated tokens of the text
    prompt_tokens: int = 0  # for prefill
    answer_tokens: int = 0  # for decode
    rounds: int = 0  # of speed measurements, as requested
    threads: int = 0
    imatrix: str = ""  # name of the importance matrix; "" for none


@dataclass(frozen=True, slots=True)
class Card:
    """Whole report."""

    name: str  # of the model
    source: str  # name of the source file
    rows: tuple[CardRow, ...] = ()  # the source, then the largest first; failures last
    method: Method = Method()
    machine: Machine = field(default_factory=Machine)
    started: float = 0.0  # seconds since 1970
    seconds: float = 0.0  # of the whole job
    is_complete: bool = True  # not interrupted
    notes: tuple[str, ...] = ()  # for display

    @property
    def source_row(self) -> CardRow | None:
        return next((row for row in self.rows if row.is_source), None)


def iso_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_json(card: Card, verdicts: Sequence[str], best: str) -> dict[str, Any]:
    """Return the card as JSON data, with units in the names and null for missing figures.

    Args:
        verdicts: one per row.
        best: the recommended type; "" for none.
    """
    method = card.method
    return {
        "format": "llmrun-report-card",
        "version": VERSION,
        "name": card.name,
        "source": card.source,
        "started": iso_time(card.started),
        "seconds": round(card.seconds, 3),
        "is_complete": card.is_complete,
        "recommended": best or None,
        "types": [_row_json(row, verdict) for row, verdict in zip(card.rows, verdicts, strict=True)],
        "method": {
            "text": method.text,
            "text_sha256": method.text_sha256 or None,
            "evaluated_tokens": method.n_tokens,
            "prompt_tokens": method.prompt_tokens,
            "answer_tokens": method.answer_tokens,
            "rounds": method.rounds,
            "threads": method.threads,
            "imatrix": method.imatrix or None,
        },
        "machine": as_dict(card.machine),
        "notes": list(card.notes),
    }


def _row_json(row: CardRow, verdict: str) -> dict[str, Any]:
    quality = row.quality
    same, error = quality.same_top, quality.same_top_error
    return {
        "type": row.type,
        "is_source": row.is_source,
        "n_bytes": row.n_bytes,
        "bits_per_weight": row.bits_per_weight,
        "prefill_tokens_per_second": row.prefill.median,
        "prefill_samples_tokens_per_second": list(row.prefill.samples),
        "decode_tokens_per_second": row.decode.median,
        "decode_samples_tokens_per_second": list(row.decode.samples),
        "peak_memory_bytes": row.peak_memory,
        "kld_mean_nats": quality.kld,
        "kld_mean_error_nats": quality.kld_error,
        "same_top_percent": None if same is None else 100 * same,
        "same_top_error_percent": None if error is None else 100 * error,
        "perplexity": quality.perplexity,
        "perplexity_error": quality.perplexity_error,
        "seconds_to_make": row.seconds,
        "path": row.path or None,
        "verdict": verdict,
        "notes": list(row.notes),
        "failure": row.failure or None,
    }


# Upper bound of the mean KLD in nats for each description. Tables of Llama-3-8B: Q8_0 has 0.001, Q5_K_M 0.011,
# Q4_K_M 0.031, Q4_0 0.072, Q3_K_M about 0.1.
_LOSSES = (
    (0.004, "no loss to speak of"),
    (0.02, "hardly any loss"),
    (0.06, "a small loss"),
    (0.2, "the loss is visible"),
    (0.6, "a heavy loss"),
)
_WORST = "broken: it answers differently"
_MAX_ROLES = 3
_GOOD_KLD, _FAIR_KLD = 0.06, 0.2

_SAME_SIZE = 0.005  # relative difference below which two files are equally large
_SAME_SPEED = 0.03  # the same for speeds, even if significant
_SAME_KLD = 0.03  # the same for divergences
# All types are measured on the same text, so their errors are correlated: a difference is more certain than both errors
# suggest. Half of the larger one is a conservative estimate.
_SHARED_ERROR = 0.5


@dataclass(frozen=True, slots=True)
class TypeComparison:
    """Respects in which one type is clearly better than another; False also if a figure is missing."""

    smaller: bool
    exacter: bool
    faster: bool
    faster_prefill: bool

    @property
    def words(self) -> list[str]:
        words = []
        if self.smaller:
            words.append("smaller")
        if self.faster:
            words.append("faster")
        elif self.faster_prefill:
            words.append("faster with prompts")
        if self.exacter:
            words.append("more exact")
        return words


def compare(one: CardRow, other: CardRow) -> TypeComparison:
    """Return the respects in which `one` is clearly better."""
    smaller = one.n_bytes is not None and other.n_bytes is not None and one.n_bytes < other.n_bytes * (1 - _SAME_SIZE)
    return TypeComparison(
        smaller,
        _is_exacter(one.quality, other.quality),
        _is_faster(one.decode, other.decode),
        _is_faster(one.prefill, other.prefill),
    )


def _is_exacter(one: Quality, other: Quality) -> bool:
    if one.kld is None or other.kld is None or one.kld_error is None or other.kld_error is None:
        return False
    error = _SHARED_ERROR * max(one.kld_error, other.kld_error)
    return other.kld - one.kld > max(error, _SAME_KLD * other.kld)


def _is_faster(one: CardSpeed, other: CardSpeed) -> bool:
    """Return whether `one` is faster with 95 % confidence, and noticeably. Rounds are pairs: each has all types."""
    if not one.samples or not other.samples or min(*one.samples, *other.samples) <= 0:
        return False
    rounds = min(len(one.samples), len(other.samples))
    verdict = statistics.compare(other.samples[:rounds], one.samples[:rounds], paired=True)
    return verdict.kind == "faster" and verdict.ratio > 1 + _SAME_SPEED


def is_measured(row: CardRow) -> bool:
    return not row.failure and row.n_bytes is not None and row.quality.kld is not None


def beaten_by(row: CardRow, rows: Sequence[CardRow]) -> tuple[CardRow, TypeComparison] | None:
    """Return the type that beats this one in most respects; None if no type does."""
    better = []
    for other in rows:
        if other is row or other.is_source or not is_measured(other):
            continue
        ahead, behind = compare(other, row), compare(row, other)
        if ahead.words and not behind.words:
            better.append((other, ahead))
    return max(better, key=lambda pair: len(pair[1].words), default=None)


def contenders(rows: Sequence[CardRow]) -> list[CardRow]:
    """Return the measured types that no other beats, without the source.

    All of them if each is beaten by another: differences just above the threshold can form a circle.
    """
    measured = [row for row in rows if not row.is_source and is_measured(row)]
    return [row for row in measured if beaten_by(row, rows) is None] or measured


def recommended(rows: Sequence[CardRow]) -> CardRow | None:
    """Return the type for general use: the fastest with a small loss, and the smallest of equally fast ones.

    If all types lose much, return the one with the smallest loss.
    """
    good = contenders(rows)
    for limit in (_GOOD_KLD, _FAIR_KLD):
        candidates = [row for row in good if (row.quality.kld or 0.0) <= limit]
        if candidates:
            best = max(candidates, key=lambda row: row.decode.median or 0.0)
            tied = [row for row in candidates if not _is_faster(best.decode, row.decode)]
            return min(tied, key=lambda row: row.n_bytes or 0)
    return min(good, key=lambda row: row.quality.kld or 0.0, default=None)


def praise(row: CardRow) -> str:
    """Describe the result of recommended(), which may still lose much."""
    return "recommended" if (row.quality.kld or 0.0) <= _FAIR_KLD else "loses least"


def bits_of(type_name: str) -> int:
    """Return the bits in a type's name, e.g. 4 for "IQ4_NL"; 0 if there are none."""
    match = re.search(r"\d+", type_name)
    return int(match[0]) if match else 0


def verdict(row: CardRow, rows: Sequence[CardRow]) -> str:
    """Describe a type in comparison with all rows of the card, in a few words."""
    if row.failure:
        return f"not measured: {row.failure}"
    if row.is_source:
        return "the source of the others"
    if not is_measured(row):
        return "not measured to the end"
    loss = loss_in_words(row.quality.kld or 0.0)
    better = beaten_by(row, rows)
    if better is not None:
        return f"beaten by {better[0].type}, which is {joined(better[1].words)}; {loss}"
    roles = [praise(row)] if row is recommended(rows) else []
    roles += _roles(row, contenders(rows))
    sizes = [other.n_bytes for other in rows if not other.is_source and other.n_bytes is not None]
    roles += ["smallest"] if row.n_bytes == min(sizes) and len(sizes) > 1 else []
    return "; ".join([", ".join(roles[:_MAX_ROLES]), loss] if roles else [loss])


def _roles(row: CardRow, rows: Sequence[CardRow]) -> list[str]:
    if len(rows) < 2:
        return []
    others = [other for other in rows if other is not row]
    roles = []
    if all(compare(row, other).faster for other in others):
        roles.append("fastest here")
    same_bits = [other for other in others if bits_of(other.type) == bits_of(row.type)]
    if all(compare(row, other).exacter for other in others):
        roles.append("closest to the source")
    elif same_bits and all(compare(row, other).exacter for other in same_bits):
        roles.append(f"most exact {bits_of(row.type)}-bit type")
    return roles


def loss_in_words(kld: float) -> str:
    """Describe a mean divergence, e.g. "a small loss"."""
    return next((words for limit, words in _LOSSES if kld <= limit), _WORST)


def joined(words: Sequence[str]) -> str:
    """Join words for display: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def verdicts(rows: Sequence[CardRow]) -> tuple[str, ...]:
    return tuple(verdict(row, rows) for row in rows)


def front(rows: Sequence[CardRow]) -> list[CardRow]:
    """Return the Pareto front of size and divergence, the smallest type first; it may contain the source."""
    measured = [row for row in rows if is_measured(row) or (row.is_source and row.n_bytes is not None)]
    best: list[CardRow] = []
    for row in sorted(measured, key=lambda one: (one.n_bytes or 0, one.quality.kld or 0.0)):
        if not best or (row.quality.kld or 0.0) < (best[-1].quality.kld or 0.0):
            best.append(row)
    return best

"""The report card as data: the measured size, speed and quality of each type, and the method.

Owns the names, also in JSON; must not know measuring or display.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from llmrun.bench.results import Machine
from llmrun.protocol.codec import as_dict

VERSION = 1
"""Version of the JSON; it increases when a name is removed or changes its meaning."""


@dataclass(frozen=True, slots=True)
class CardSpeed:
    """Tokens/s of several rounds; all types take turns, so that a busy minute slows all of them down."""

    samples: tuple[float, ...] = ()  # one per round

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

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

"""The report card as data: a row for each type with its size, speed and quality as measured, and how that was done.

Owns the names, also in JSON; must not know how anything is measured or shown.
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
"""Of the JSON; it grows when a name goes or changes its meaning."""


@dataclass(frozen=True, slots=True)
class CardSpeed:
    """Tokens/s of several rounds; all types take turns, so that a busy minute slows all of them down.

    Attributes:
        samples: of each round.
    """

    samples: tuple[float, ...] = ()

    @property
    def median(self) -> float | None:
        """None when it was not measured."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def low(self) -> float | None:
        """The slowest round."""
        return min(self.samples, default=None)

    @property
    def high(self) -> float | None:
        """The fastest round."""
        return max(self.samples, default=None)


@dataclass(frozen=True, slots=True)
class Quality:
    """How far a model's next-token distributions are from the source's, over the same text.

    Attributes:
        perplexity: on the text.
        perplexity_error: half of its 95 % interval; so are the other errors.
        kld: mean Kullback-Leibler divergence from the source, in nats; 0 is identical.
        same_top: share of positions where both find the same token most likely, 0 to 1.
    """

    perplexity: float | None = None
    perplexity_error: float | None = None
    kld: float | None = None
    kld_error: float | None = None
    same_top: float | None = None
    same_top_error: float | None = None


@dataclass(frozen=True, slots=True)
class CardRow:
    """One type.

    Attributes:
        type: e.g. "Q4_K_M".
        is_source: it is what the others are made from, and compared with.
        n_bytes: of the file(s).
        bits_per_weight: of all weights.
        prefill: of a prompt, tokens/s.
        decode: of an answer, tokens/s.
        peak_memory: bytes; the largest resident set of the engine process, file pages included.
        seconds: that making it took.
        path: where the file was kept; "" when it is gone.
        notes: about this type, for people.
        failure: why it could not be made or measured; "" when all went well.
    """

    type: str
    is_source: bool = False
    n_bytes: int | None = None
    bits_per_weight: float | None = None
    prefill: CardSpeed = CardSpeed()
    decode: CardSpeed = CardSpeed()
    peak_memory: int | None = None
    quality: Quality = Quality()
    seconds: float | None = None
    path: str = ""
    notes: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Method:
    """How it was measured.

    Attributes:
        text: what quality was measured on, for people.
        text_sha256: of its UTF-8 bytes.
        n_tokens: of it that were evaluated; 0 when none were.
        prompt_tokens: of the prompt that prefill was measured with.
        answer_tokens: of the answer that decode was measured with.
        rounds: of measuring speed that were asked for.
        threads: that computed.
        imatrix: name of the importance matrix; "" for none.
    """

    text: str = ""
    text_sha256: str = ""
    n_tokens: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    rounds: int = 0
    threads: int = 0
    imatrix: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """The whole report.

    Attributes:
        name: of the model.
        source: name of the file that the types were made from.
        rows: the source first, then by size, the largest first; what failed comes last.
        machine: where it was measured, as `llmrun bench` describes it.
        started: seconds since 1970.
        seconds: that everything took.
        is_complete: nobody stopped it.
        notes: about the whole, for people.
    """

    name: str
    source: str
    rows: tuple[CardRow, ...] = ()
    method: Method = Method()
    machine: Machine = field(default_factory=Machine)
    started: float = 0.0
    seconds: float = 0.0
    is_complete: bool = True
    notes: tuple[str, ...] = ()

    @property
    def source_row(self) -> CardRow | None:
        """What the others are compared with."""
        return next((row for row in self.rows if row.is_source), None)


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601, in UTC, to the second."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_json(card: Card, verdicts: Sequence[str], best: str) -> dict[str, Any]:
    """The card as JSON data, with units in the names and null for what was not measured.

    Args:
        verdicts: what is to be said about each row.
        best: the type that is recommended; "" for none.
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

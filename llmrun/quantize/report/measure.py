"""The results of the measurements for a report card. Must not know their order or use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmrun.quantize.report.card import Quality

OnShare = Callable[[float], None]
"""Called with the share of one measurement that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class SourceModel:
    """Source of the quantized types."""

    name: str
    type: str  # e.g. "F16"
    n_bytes: int
    bits_per_weight: float
    n_parameters: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """Quantized file."""

    n_bytes: int
    bits_per_weight: float
    seconds: float  # for quantizing
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeedMeasurement:
    """One round of speed measurements."""

    prefill: float  # tokens/s
    decode: float  # tokens/s
    peak_memory: int | None  # largest resident set of the engine process in bytes; None if unknown


@dataclass(frozen=True, slots=True)
class QualityMeasurement:
    """Quality of a model and of the source on the same text."""

    quality: Quality
    source: Quality
    text: str  # name for display
    text_sha256: str  # of the UTF-8 bytes; only figures on the same text are comparable
    n_tokens: int  # evaluated tokens

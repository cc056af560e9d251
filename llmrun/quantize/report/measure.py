"""The interface of the measurements for a report card, and their results.

Owns the signatures; must not know the order of the measurements, or the use of the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmrun.bench.results import Machine
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


class Measurements(Protocol):
    """Measurements for the card. Each raises LlmrunError after a failure, and can be interrupted."""

    prompt_tokens: int
    answer_tokens: int
    threads: int

    def machine(self) -> Machine:
        """Return a description of this machine."""

    def original(self) -> SourceModel:
        """Return the facts about the source."""

    def expected_bytes(self, kind: str) -> int:
        """Return the expected file size of a type; raise UsageError if the type is invalid."""

    def make(self, kind: str, target: Path, on_share: OnShare) -> QuantizedModel:
        """Write the file of a type."""

    def time(self, model: Path, on_share: OnShare) -> SpeedMeasurement:
        """Measure the speed of a model once, in an engine process of its own."""

    def judge(self, model: Path, on_share: OnShare) -> QualityMeasurement:
        """Compare a model with the source."""

"""The measurements that a report card is made of, and who makes them: quantize, bench and evaluate.

Owns how they are called; must not know in which order, or what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmrun.bench.results import Machine
from llmrun.quantize.report.card import Quality

OnShare = Callable[[float], None]
"""Gets how much of one measurement is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class SourceModel:
    """The source.

    Attributes:
        type: e.g. "F16".
        n_parameters: weights.
    """

    name: str
    type: str
    n_bytes: int
    bits_per_weight: float
    n_parameters: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """A file that was written. seconds: that it took."""

    n_bytes: int
    bits_per_weight: float
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeedMeasurement:
    """One round: tokens/s, and the largest resident set of the engine process in bytes where the system tells."""

    prefill: float
    decode: float
    peak_memory: int | None


@dataclass(frozen=True, slots=True)
class QualityMeasurement:
    """Quality of a model and of the source on the same text.

    Attributes:
        text: what text that was, for people.
        text_sha256: of its UTF-8 bytes: only figures on the same text can be compared.
        n_tokens: of it that were evaluated.
    """

    quality: Quality
    source: Quality
    text: str
    text_sha256: str
    n_tokens: int


class Measurements(Protocol):
    """What can be measured. Everything raises LlmrunError when it can't be done, and may be interrupted."""

    prompt_tokens: int
    answer_tokens: int
    threads: int

    def machine(self) -> Machine:
        """Where this is."""

    def original(self) -> SourceModel:
        """The source."""

    def expected_bytes(self, kind: str) -> int:
        """How large the file of a type will be; refuses types that are invalid."""

    def make(self, kind: str, target: Path, on_share: OnShare) -> QuantizedModel:
        """Write the file of a type."""

    def time(self, model: Path, on_share: OnShare) -> SpeedMeasurement:
        """Measure the speed of a model once, in an engine process of its own."""

    def judge(self, model: Path, on_share: OnShare) -> QualityMeasurement:
        """Compare a model with the source."""

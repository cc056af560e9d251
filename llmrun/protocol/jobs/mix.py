"""The job `mix`: how much a model's answers would suffer from each type that each of its tensors could get."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import JobKind


@dataclass(frozen=True, slots=True)
class MeasureMix:
    """Measure what each type would cost each tensor.

    Attributes:
        files: paths of the model's files, absolute, in their order.
        candidates: tensor -> ggml's numbers of the types it could get.
        text: that the model reads; only its beginning is used.
        imatrix: path of an importance matrix in GGUF, absolute; "" for none.
        threads: at least 1.
        seconds: that the model may read for, roughly: the longer, the finer the parts that are told apart.
    """

    files: tuple[str, ...]
    candidates: dict[str, tuple[int, ...]]
    text: str
    imatrix: str = ""
    threads: int = 1
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class MeasureUpdate:
    """How much of the work is done, 0 to 1."""

    share: float


@dataclass(frozen=True, slots=True)
class MixMeasurement:
    """What was measured.

    Attributes:
        losses: tensor -> for each of its candidates the Kullback-Leibler divergence, in nats a token, that it is
            expected to add to the model's.
        groups: of how many groups of tensors the sensitivity was measured; 0 where the model predicts no text, so
            that each tensor counts by its relative error.
        positions: at how many places of the text.
    """

    losses: dict[str, tuple[float, ...]]
    groups: int
    positions: int


MIX = JobKind("mix", MeasureMix, MeasureUpdate, MixMeasurement, lambda command: command.files[:1])

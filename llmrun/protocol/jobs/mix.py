"""The job `mix`: the loss of a model's quality from each type that each of its tensors could get."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import JobKind


@dataclass(frozen=True, slots=True)
class MeasureMix:
    """Measure the loss of each tensor with each type."""

    model: str  # path of the model's (first) file, absolute
    candidates: dict[str, tuple[int, ...]]  # tensor -> ggml's numbers of possible types
    text: str  # only its beginning is used
    imatrix: str = ""  # path of an importance matrix in GGUF, absolute; "" for none
    threads: int = 1
    seconds: float = 60.0  # approximate time of the model's passes; more time gives smaller groups of tensors


@dataclass(frozen=True, slots=True)
class MixMeasurement:
    """The expected losses."""

    # Tensor -> for each candidate the expected increase of the Kullback-Leibler divergence, nats per token.
    losses: dict[str, tuple[float, ...]]
    # Number of groups of tensors whose sensitivity was measured; 0 if the model predicts no text, and each tensor's
    # loss is its relative error.
    groups: int
    positions: int  # number of compared positions in the text


MIX = JobKind("mix", MeasureMix, float, MixMeasurement, lambda command: (command.model,))

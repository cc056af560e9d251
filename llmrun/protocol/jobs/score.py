"""The job `score`: how likely each token of a text is to a model, and the whole text's perplexity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmrun.protocol.jobs import JobKind
from llmrun.protocol.jobs.evaluate import EvaluateUpdate, Figure


@dataclass(frozen=True, slots=True)
class ScoreText:
    """Score a text.

    Attributes:
        model: path of its GGUF file, absolute.
        text: what is scored.
        n_ctx: most tokens that are read together.
        threads, gpu_layers, flash_attention, kv_type_k, kv_type_v: as in jobs.evaluate.Evaluate.
    """

    model: str
    text: str
    n_ctx: int
    threads: int = 1
    gpu_layers: int = -1
    flash_attention: str = "auto"
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"


class ScoredToken(NamedTuple):
    """A token of the text.

    Attributes:
        id: in the vocabulary.
        data: its bytes, in hex.
        logprob: natural logarithm of its probability behind those before it; None where nothing is before it.
    """

    id: int
    data: str
    logprob: float | None


@dataclass(frozen=True, slots=True)
class ScoredText:
    """What came out.

    Attributes:
        tokens: of the text, in order.
        n_ctx: tokens that were read together.
        windows: how often; where more than once, each window begins with half of the one before, which is not scored.
        perplexity: exp of the mean negative log-probability.
        bits_per_byte: of the text that was scored.
    """

    tokens: tuple[ScoredToken, ...]
    n_ctx: int
    windows: int
    perplexity: Figure
    bits_per_byte: float


SCORE = JobKind("score", ScoreText, EvaluateUpdate, ScoredText, lambda command: (command.model,))

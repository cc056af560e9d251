"""The job `score`: the log-probability of each token of a text, and the text's perplexity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmrun.protocol.adapters import Adapter
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.jobs.evaluate import EvaluateUpdate, Figure
from llmrun.protocol.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class ScoreText(EngineSettings):
    """Score a text."""

    model: str  # path of its GGUF file, absolute
    text: str
    n_ctx: int  # maximum tokens of a window
    adapters: tuple[Adapter, ...] = ()


class ScoredToken(NamedTuple):
    """A token of the text."""

    id: int
    data: str  # its bytes, in hex
    logprob: float | None  # natural logarithm, given the tokens before it; None for the first


@dataclass(frozen=True, slots=True)
class ScoredText:
    """The scores of a text."""

    tokens: tuple[ScoredToken, ...]
    n_ctx: int  # tokens of a window
    windows: int  # each later one begins with at least half of the one before, which is not scored again
    perplexity: Figure  # exp of the mean negative log-probability
    bits_per_byte: float


SCORE = JobKind("score", ScoreText, EvaluateUpdate, ScoredText, lambda command: (command.model,))

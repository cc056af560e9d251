"""The jobs that compute how well a model predicts a text.

`evaluate`: quality on a text, alone or compared with a reference model; `score`: the log-probability of each token of a
text, and its perplexity; `prompt_scores`: the log-probability of each token of a prompt, as the loaded model predicts
it. Divergences are in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmrun.protocol.adapters import Adapter
from llmrun.protocol.jobs import Empty, JobKind
from llmrun.protocol.messages import TokenLogprob
from llmrun.protocol.settings import EngineSettings

BLOCKS = (256, 64)
"""Consecutive positions that count as one observation of an interval, because neighbours are correlated: over 24 chunks
of prose a mean KLD is 1.5 times as uncertain as with independent positions, over 24 chunks of documentation 2.2 times.
The smaller number is for short texts."""
LEAST_BLOCKS = 10
"""Blocks that an interval, and so a verdict, requires.

Blocks are the batches of the method of batch means, which needs 10 to 30 of them: with fewer, chance decides the width
of Student's interval (B. Schmeiser, Batch Size Effects in the Analysis of Simulation Output, Operations Research 30,
1982). Over 3 chunks of 512 tokens of documentation (12 blocks), intervals of perplexity and of the mean KLD contained
the figure of 50 chunks in about 90 % of cases.
"""


def least_chunks(n_ctx: int) -> int:
    """Return the number of chunks of n_ctx tokens that have LEAST_BLOCKS blocks among their scored positions."""
    scored = n_ctx - 1 - n_ctx // 2  # of a chunk, see engine/jobs/evaluate.py
    return -(-LEAST_BLOCKS // -(-scored // BLOCKS[-1]))


@dataclass(frozen=True, slots=True)
class Evaluate(EngineSettings):
    """Measure a model. KV types are of the model; the reference has f16."""

    model: str  # path of its GGUF file, absolute
    text: str
    reference: str = ""  # path of the model to compare with, absolute; "" for none
    n_ctx: int = 512  # tokens of a chunk; chunks are independent
    chunks: int = 1  # maximum number of the text's chunks
    every_position: bool = False  # score all positions of a chunk, not only those of its second half
    needles: bool = False  # hide facts in texts of up to n_ctx tokens, and ask for them
    adapters: tuple[Adapter, ...] = ()  # of the model, not of the reference


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure estimated from a sample."""

    value: float
    # Standard error as llama-perplexity computes it, with every position independent; 0 for quantiles, and with fewer
    # than eleven positions.
    error: float
    # 95 % confidence interval. It is computed from the differences between blocks of positions, because neighbours are
    # correlated, so it is wider than +- 1.96 errors. None with fewer than LEAST_BLOCKS blocks.
    low: float | None = None
    high: float | None = None

    @property
    def half(self) -> float | None:
        """Half of the interval's width."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class Divergence:
    """The difference between a model and its reference.

    KLD is the Kullback-Leibler divergence D(reference || model) of the next-token distributions at a position, in nats:
    the extra length of the reference's tokens in a code made for the model.
    """

    mean: Figure  # this and the next six: of the KLD over positions
    median: Figure
    p90: Figure
    p95: Figure
    p99: Figure
    p999: Figure
    maximum: float
    same_top: Figure  # share of the positions at which both have the same most likely token, 0 to 1
    log_ratio: Figure  # ln(perplexity / reference_perplexity)
    ratio: Figure  # perplexity / reference_perplexity
    probability_change: Figure  # mean change of the probability of the text's own token
    rms_change: Figure  # root mean square of that change
    reference_perplexity: Figure  # on the same positions
    correlation: float  # of both models' log-probabilities over positions, -1 to 1


@dataclass(frozen=True, slots=True)
class PositionRange:
    """Figures for positions [start, end) of all chunks: the effect of longer context."""

    start: int
    end: int
    positions: int  # number of scored positions
    perplexity: Figure
    reference_perplexity: Figure | None = None  # this and the next two: None without a reference
    divergence: Figure | None = None  # mean KLD
    same_top: Figure | None = None


@dataclass(frozen=True, slots=True)
class Needle:
    """A fact hidden in a long text, and the answer to a question about it at the end."""

    n_tokens: int  # of the whole text
    depth: float  # place of the fact in the text, 0 (beginning) to 1
    found: bool  # greedy decoding gives the right answer
    probability: float  # of the right answer
    reference_found: bool | None = None  # None without a reference, as the next one
    reference_probability: float | None = None


@dataclass(frozen=True, slots=True)
class EvaluateResult:
    """The figures, partial while the job runs."""

    chunks: int  # evaluated
    chunks_there: int  # in the text
    n_ctx: int
    positions: int  # scored for all but by_position: those of the second half of each chunk
    perplexity: Figure | None = None  # None before the first chunk is done
    bits_per_byte: float = 0.0  # of the scored text; comparable between models of different vocabularies
    divergence: Divergence | None = None  # None without a reference
    by_position: tuple[PositionRange, ...] = ()  # empty unless every position was scored
    needles: tuple[Needle, ...] = ()
    decode_seconds: float = 0.0
    score_seconds: float = 0.0  # for computing the figures from logits


@dataclass(frozen=True, slots=True)
class EvaluateUpdate:
    """Progress of an evaluation."""

    done: int  # tokens decoded by the models, the reference's included
    total: int  # 0 while loading
    so_far: EvaluateResult | None = None  # partial figures; None if unchanged


EVALUATE = JobKind(
    "evaluate",
    Evaluate,
    EvaluateUpdate,
    EvaluateResult,
    lambda command: tuple(filter(None, (command.model, command.reference))),
)


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


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """Score a prompt."""

    text: str
    tokens: tuple[int | str, ...]  # ids, and texts between them; the text counts if there are none
    top: int  # number of most likely tokens to report in each place


# Log-probabilities of a prompt's tokens; that of the first one, which nothing predicts, is 0.
PROMPT_SCORES = JobKind("prompt_scores", ScorePrompt, Empty, tuple[TokenLogprob, ...], needs_model=True)

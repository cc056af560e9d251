"""What crosses the pipe when a model's quality is measured: on a text, alone or beside a reference model.

Owns names and meaning of the figures; must not know how they are computed or shown. "Natural" figures are in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import JobKind

BLOCKS = (256, 64)
"""Positions in a row that count as one observation when an interval is computed, because neighbours have much in
common: over 24 chunks of prose a mean KLD is 1.5 times as uncertain as independent positions would make it, over 24
chunks of documentation 2.2 times. The smaller number is for short texts."""
LEAST_BLOCKS = 10
"""Blocks that an interval needs, and so a verdict.

Blocks are the batches of the method of batch means, which wants 10 to 30 of them: with fewer, chance decides the width
of Student's interval (B. Schmeiser, Batch Size Effects in the Analysis of Simulation Output, Operations Research 30,
1982). Over 3 chunks of 512 tokens of documentation (12 blocks), intervals of perplexity and of the mean KLD contained
the figure of 50 chunks in about 90 % of cases.
"""


def least_chunks(n_ctx: int) -> int:
    """Return the number of chunks of n_ctx tokens that have LEAST_BLOCKS blocks among their scored positions."""
    scored = n_ctx - 1 - n_ctx // 2  # of a chunk, see engine/jobs/evaluate.py
    return -(-LEAST_BLOCKS // -(-scored // BLOCKS[-1]))


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Measure a model.

    Attributes:
        model: path of its GGUF file, absolute.
        text: what it is measured on.
        reference: path of the model it is compared with, absolute; "" for none.
        n_ctx: tokens of a chunk. Each chunk is read by itself.
        chunks: how many of the text's chunks at most.
        every_position: score all positions of a chunk, not only those of its second half.
        needles: hide facts in texts of up to n_ctx tokens, and ask for them.
        threads: that compute at the same time.
        gpu_layers: of each model, how many layers go to the GPU; -1 is all.
        flash_attention: as in loading.Load.
        kv_type_k, kv_type_v: as in loading.Load, of the model; the reference has f16.
    """

    model: str
    text: str
    reference: str = ""
    n_ctx: int = 512
    chunks: int = 1
    every_position: bool = False
    needles: bool = False
    threads: int = 1
    gpu_layers: int = -1
    flash_attention: str = "auto"
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that was measured on a sample.

    Attributes:
        value: of the sample.
        error: standard error as llama-perplexity gives it, which counts every position as independent; 0 for
            quantiles, and with fewer than eleven positions.
        low: where the interval begins that contains the true value with a probability of 95 %. It is computed from how
            much blocks of positions differ, because neighbours have much in common, so it is wider than +- 1.96 errors.
            None with fewer than LEAST_BLOCKS blocks.
        high: where it ends.
    """

    value: float
    error: float
    low: float | None = None
    high: float | None = None

    @property
    def half(self) -> float | None:
        """Half of the interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class Divergence:
    """How a model differs from its reference.

    KLD is the Kullback-Leibler divergence of the reference's next-token distribution from the model's at a position:
    how many nats a code made for the model wastes on what the reference says.

    Attributes:
        mean: of the KLD over positions.
        median: of the KLD.
        p90, p95, p99, p999: quantiles of the KLD: 90 % of the positions have at most p90, and so on.
        maximum: of the KLD.
        same_top: share of the positions at which both find the same token likeliest, 0 to 1.
        log_ratio: ln(perplexity / reference_perplexity).
        ratio: perplexity / reference_perplexity.
        probability_change: mean change of the probability of the text's own token.
        rms_change: root of the mean square of that change.
        reference_perplexity: of the reference on the same positions.
        correlation: of both models' log-probabilities over positions, -1 to 1.
    """

    mean: Figure
    median: Figure
    p90: Figure
    p95: Figure
    p99: Figure
    p999: Figure
    maximum: float
    same_top: Figure
    log_ratio: Figure
    ratio: Figure
    probability_change: Figure
    rms_change: Figure
    reference_perplexity: Figure
    correlation: float


@dataclass(frozen=True, slots=True)
class PositionRange:
    """The positions start to end - 1 of all chunks: how well the model uses so much context.

    Attributes:
        reference_perplexity, divergence, same_top: None without a reference; divergence is the mean KLD.
    """

    start: int
    end: int
    positions: int
    perplexity: Figure
    reference_perplexity: Figure | None = None
    divergence: Figure | None = None
    same_top: Figure | None = None


@dataclass(frozen=True, slots=True)
class Needle:
    """A fact that was hidden in a long text and asked for at its end.

    Attributes:
        n_tokens: of the whole text.
        depth: where the fact stood, 0 (at the beginning) to 1.
        found: greedy decoding gives the right answer.
        probability: of the right answer.
        reference_found, reference_probability: the same for the reference; None without one.
    """

    n_tokens: int
    depth: float
    found: bool
    probability: float
    reference_found: bool | None = None
    reference_probability: float | None = None


@dataclass(frozen=True, slots=True)
class EvaluateResult:
    """What was measured, up to now while it goes on.

    Attributes:
        chunks: that were read.
        chunks_there: that the text has.
        n_ctx: tokens of a chunk.
        positions: that were scored for everything but by_position: those of the second half of each chunk.
        perplexity: exp of the mean negative log-likelihood; None before the first chunk is done.
        bits_per_byte: of the text that was scored; comparable between models of different vocabularies.
        divergence: None without a reference.
        by_position: empty unless every position was scored.
        needles: empty unless there were any.
        decode_seconds: spent in the models.
        score_seconds: spent on their logits.
    """

    chunks: int
    chunks_there: int
    n_ctx: int
    positions: int
    perplexity: Figure | None = None
    bits_per_byte: float = 0.0
    divergence: Divergence | None = None
    by_position: tuple[PositionRange, ...] = ()
    needles: tuple[Needle, ...] = ()
    decode_seconds: float = 0.0
    score_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EvaluateUpdate:
    """How far it is.

    Attributes:
        done: tokens that the models have read, the reference's counted too.
        total: that they will have read; 0 while they are loaded.
        so_far: the figures up to here; None when they have not changed.
    """

    done: int
    total: int
    so_far: EvaluateResult | None = None


def _models(command: Evaluate) -> tuple[str, ...]:
    return tuple(filter(None, (command.model, command.reference)))


EVALUATE = JobKind("evaluate", Evaluate, EvaluateUpdate, EvaluateResult, _models)

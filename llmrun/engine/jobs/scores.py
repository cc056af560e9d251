"""Scores from logits, and figures with intervals from scores.

Names, standard errors and quantiles are those of llama.cpp's tools/perplexity; the intervals are ours. llama-perplexity
compares with log-probabilities that it stored in 16 bits, without tokens less likely than e^-16; here both rows of
logits are complete.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmrun.protocol.jobs.evaluate import BLOCKS, LEAST_BLOCKS, Divergence, Figure, PositionRange
from llmrun.statistics import half_width, positive_interval, quantile

Array = Any  # NumPy's array; its own types say little more

SCORE = np.dtype(
    [
        ("chunk", np.int32),
        ("position", np.int32),  # of the last token before the prediction, in its chunk
        ("nll", np.float64),  # negative log-likelihood of the next token, in nats
        ("top", np.bool_),  # that token is the model's most likely one
        ("n_bytes", np.int32),  # of that token
        ("reference_nll", np.float64),  # NaN without a reference
        ("reference_top", np.bool_),
        ("kld", np.float64),  # D(reference || model), in nats
        ("same_top", np.bool_),  # both have the same most likely token
    ]
)
"""The scores of one position. The fields after n_bytes need a reference."""

_MIN_LARGE_BLOCKS = 20  # with fewer blocks of the larger size, the smaller size is used

_Z = 1.959964  # 97.5 % quantile of the normal distribution
_MAX_LOG = 700.0  # exp() of more overflows
_MIN_POSITIONS = 10  # llama-perplexity gives no errors for fewer


def logits_at(address: int, n_logits: int) -> Array:
    """Return logits in llama.cpp's memory, float32; they are valid until the next decode call."""
    memory: Any = (ctypes.c_float * n_logits).from_address(address)  # a buffer, which NumPy's types don't know
    return np.frombuffer(memory, np.float32)


class Rows:
    """A scorer of rows of logits in llama.cpp's memory. Its three buffers are reused and stay in the core's cache."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._model = np.empty(n_vocab, np.float32)
        self._reference = np.empty(n_vocab, np.float32)
        self._weights = np.empty(n_vocab, np.float32)

    def score(self, address: int, token: int) -> tuple[float, bool]:
        """Return a token's negative log-likelihood, NaN for invalid logits, and whether it is the most likely token."""
        logits, top = self._shifted(address, self._model)
        logit = float(logits[token])
        np.exp(logits, out=logits)
        return math.log(logits.sum(dtype=np.float64)) - logit, top == token

    def compare(self, address: int, reference: int, token: int, row: Array) -> None:
        """Write a position's scores to its row of SCORE.

        With p the reference's probabilities and q the model's, the divergence is sum(p * (ln p - ln q)), and
        ln p = a - ln(sum(exp(a))) with a the logits less their maximum.
        """
        model, top = self._shifted(address, self._model)
        base, reference_top = self._shifted(reference, self._reference)
        logit, logit_base = float(model[token]), float(base[token])
        weights = np.exp(base, out=self._weights)
        total_base = float(weights.sum(dtype=np.float64))
        log_base = math.log(total_base)
        with np.errstate(invalid="ignore"):
            np.subtract(base, model, out=base)
        difference = float(np.dot(weights, base)) / total_base
        if math.isnan(difference):  # -inf, impossible, in both
            base[weights == 0] = 0
            difference = float(np.dot(weights, base)) / total_base
        log_model = math.log(np.exp(model, out=model).sum(dtype=np.float64))
        row["nll"], row["top"] = log_model - logit, top == token
        row["reference_nll"], row["reference_top"] = log_base - logit_base, reference_top == token
        row["kld"] = max(difference + log_model - log_base, 0.0)  # rounding may give a negative number
        row["same_top"] = top == reference_top

    def _shifted(self, address: int, out: Array) -> tuple[Array, int]:
        """Return a row less its maximum, and the maximum's index."""
        logits = logits_at(address, self._n_vocab)
        top = int(logits.argmax())
        return np.subtract(logits, logits[top], out=out), top


# ---- figures ---------------------------------------------------------------------------------------


def perplexity(scores: Array, column: str = "nll") -> Figure:
    return _exp(_mean(scores[column], _blocks(scores)))


def bits_per_byte(scores: Array) -> float:
    """Return the bits per byte of the text in a code made for the model."""
    n_bytes = int(scores["n_bytes"].sum())
    return float(scores["nll"].sum()) / math.log(2) / n_bytes if n_bytes else 0.0


def divergence(scores: Array) -> Divergence:
    """Compare the model with its reference at these positions."""
    blocks = _blocks(scores)
    kld, nll, base = scores["kld"], scores["nll"], scores["reference_nll"]
    ordered = np.sort(kld)
    quantiles = {share: _quantile(kld, ordered, blocks, share) for share in (0.5, 0.9, 0.95, 0.99, 0.999)}
    log_ratio = _mean(nll - base, blocks)
    change = np.exp(-nll) - np.exp(-base)
    return Divergence(
        mean=_positive_mean(kld, blocks),
        median=quantiles[0.5],
        p90=quantiles[0.9],
        p95=quantiles[0.95],
        p99=quantiles[0.99],
        p999=quantiles[0.999],
        maximum=float(ordered[-1]),
        same_top=_share(scores["same_top"], blocks),
        log_ratio=log_ratio,
        ratio=_exp(log_ratio),
        probability_change=_mean(change, blocks),
        rms_change=_root(_positive_mean(change * change, blocks)),
        reference_perplexity=perplexity(scores, "reference_nll"),
        correlation=_correlation(nll, base),
    )


def position_ranges(scores: Array, n_ctx: int, *, compared: bool) -> tuple[PositionRange, ...]:
    """Return figures by position: 0 to 512, to 1,024, to 2,048 and so on up to the chunk's end."""
    ranges = []
    for start, end in range_bounds(n_ctx):
        part = scores[(scores["position"] >= start) & (scores["position"] < end)]
        if not len(part):
            continue
        figures = PositionRange(start, end, len(part), perplexity(part))
        if compared:
            blocks = _blocks(part)
            figures = replace(
                figures,
                reference_perplexity=perplexity(part, "reference_nll"),
                divergence=_positive_mean(part["kld"], blocks),
                same_top=_share(part["same_top"], blocks),
            )
        ranges.append(figures)
    return tuple(ranges)


def range_bounds(n_ctx: int) -> list[tuple[int, int]]:
    """Return the bounds of position_ranges()."""
    bounds = [0, 512]
    while bounds[-1] < n_ctx:
        bounds.append(2 * bounds[-1])
    bounds[-1] = n_ctx
    return list(itertools.pairwise(bounds))


def _blocks(scores: Array) -> Array:
    """Return the number of each position's block."""
    place = scores["position"] - scores["position"].min()
    for size in BLOCKS:
        in_chunk = place // size
        keys = scores["chunk"].astype(np.int64) * (int(in_chunk.max()) + 1) + in_chunk
        distinct, blocks = np.unique(keys, return_inverse=True)
        if len(distinct) >= _MIN_LARGE_BLOCKS:
            break
    return blocks


def _mean(values: Array, blocks: Array) -> Figure:
    """Return the mean; its interval is Student's t over the blocks' sums of deviations from it (a ratio estimate).

    With fewer than LEAST_BLOCKS blocks there is no interval.
    """
    count = len(values)
    mean = float(np.mean(values))
    error = math.sqrt(float(np.var(values)) / (count - 1)) if count > _MIN_POSITIONS else 0.0
    sums = np.bincount(blocks, values - mean)
    if len(sums) < LEAST_BLOCKS:
        return Figure(mean, error)
    half = half_width(sums.tolist()) * len(sums) / count
    return Figure(mean, error, mean - half, mean + half)


def _positive_mean(values: Array, blocks: Array) -> Figure:
    """Return the mean of non-negative values, with a non-negative interval."""
    mean = _mean(values, blocks)
    return mean if mean.half is None else Figure(mean.value, mean.error, *positive_interval(mean.value, mean.half))


def _share(flags: Array, blocks: Array) -> Figure:
    """Return the share of true flags. Wilson's interval has a width at 0 % and 100 % too."""
    mean = _mean(flags, blocks)
    share, half, count = mean.value, mean.half, float(len(flags))
    if half is None:
        return mean
    variance = share * (1 - share)
    if half > 0 and variance > 0:
        count = min(count, variance * (_Z / half) ** 2)  # the effective number of independent positions
    square = _Z * _Z / count
    middle = (share + square / 2) / (1 + square)
    width = _Z / (1 + square) * math.sqrt(variance / count + square / (4 * count))
    return Figure(share, mean.error, max(0.0, middle - width), min(1.0, middle + width))


def _quantile(values: Array, ordered: Array, blocks: Array, share: float) -> Figure:
    """Return a quantile, between neighbours as llama-perplexity does it.

    Its interval is Woodruff's: that of the share of values below it, mapped back by the sample's quantiles.
    """
    value = quantile(ordered, share)
    half = _mean(values <= value, blocks).half
    if half is None:
        return Figure(value, 0.0)
    return Figure(value, 0.0, quantile(ordered, max(share - half, 0.0)), quantile(ordered, min(share + half, 1.0)))


def _exp(log: Figure) -> Figure:
    figure = _mapped(log, lambda value: math.exp(min(value, _MAX_LOG)))
    return replace(figure, error=figure.value * log.error)


def _root(square: Figure) -> Figure:
    figure = _mapped(square, math.sqrt)
    return replace(figure, error=0.5 / figure.value * square.error if figure.value else 0.0)


def _mapped(figure: Figure, function: Callable[[float], float]) -> Figure:
    """Return a figure's value and interval under an increasing function."""
    ends = (None if end is None else function(end) for end in (figure.low, figure.high))
    return Figure(function(figure.value), figure.error, *ends)


def _correlation(one: Array, other: Array) -> float:
    """Return Pearson's correlation; 1 if a model's values are all equal."""
    return float(np.corrcoef(one, other)[0, 1]) if np.std(one) * np.std(other) else 1.0


def joined(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, SCORE)

"""The job `explain`: the computation of a finished answer, layer by layer.

Positions count in the whole sequence, prompt and answer; figures are those of the observed positions, from
RunCollected.first on. Norms are Euclidean lengths of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmrun.protocol.jobs import Empty, JobKind
from llmrun.protocol.jobs.text import VocabularyPiece


@dataclass(frozen=True, slots=True)
class ExplainRun:
    """Explain a finished answer."""

    answer: int  # number of its request
    everywhere: bool = False  # the logit lens for every observed position, not only those that chose a token


class HeadFigures(NamedTuple):
    """The average behaviour of an attention head."""

    previous: float  # share of its attention on the token before
    first: float  # share on the first token
    spread: float  # entropy relative to uniform attention, 0 to 1


@dataclass(frozen=True, slots=True)
class WatchedLayer:
    """One layer. Tuples are empty if the model has no tensor of that name."""

    residual: tuple[float, ...] = ()  # norm of each position's vector in the residual stream after the layer
    attention: tuple[float, ...] = ()  # norm of the attention's contribution
    feed_forward: tuple[float, ...] = ()  # norm of the feed-forward part's contribution
    heads: tuple[HeadFigures, ...] = ()
    experts: tuple[tuple[int, ...], ...] = ()  # the active ones of each position, the largest weight first
    prefill_seconds: float = 0.0  # for all observed positions together; 0 if unknown
    decode_seconds: float = 0.0  # for one position; 0 if unknown


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """The attention weights of one head."""

    role: str  # the reason for its choice: "previous", "first", "spread" or "sharp"
    layer: int
    head: int
    rows: tuple[tuple[float, ...], ...]  # for each observed position, the weights of positions 0 to its own


@dataclass(frozen=True, slots=True)
class LensCell:
    """The prediction of the model if it ended after a layer."""

    layer: int
    candidates: tuple[int, ...]  # ids of the most likely tokens, the most likely first
    probabilities: tuple[float, ...]  # of the candidates
    next: float  # probability of the actual next token; 0 without one
    rank: int  # number of tokens more likely than that one; -1 without one


@dataclass(frozen=True, slots=True)
class LensColumn:
    """The logit lens at one position, from the first layer to the last."""

    position: int  # its vector predicts the token after it
    next: float  # probability of that token in the model itself; 0 without one
    cells: tuple[LensCell, ...]


class Neighbour(NamedTuple):
    """A token of the vocabulary with an embedding similar to another's."""

    token: int
    similarity: float  # cosine
    x: float  # as in EmbeddedToken
    y: float


@dataclass(frozen=True, slots=True)
class EmbeddedToken:
    """A token's place in the embedding space."""

    token: int
    x: float  # in the plane of the first two principal components of these tokens' embeddings
    y: float
    neighbours: tuple[Neighbour, ...]  # the nearest of the whole vocabulary; none of, or among, control tokens


@dataclass(frozen=True, slots=True)
class EmbeddingPlane:
    """The input embeddings of the observed tokens."""

    width: int  # dimensions of an embedding
    shown: float  # share of the variance that the plane shows
    tokens: tuple[EmbeddedToken, ...]  # each once


@dataclass(frozen=True, slots=True)
class RunCollected:
    """The observations."""

    tokens: tuple[int, ...]
    pieces: tuple[VocabularyPiece, ...]  # texts of all tokens that occur
    n_prompt: int  # number of prompt tokens
    first: int  # the first observed position
    embedding: tuple[float, ...]  # norms of the observed positions' vectors before the first layer
    embeddings: EmbeddingPlane | None  # None if the file has no embedding matrix
    layers: tuple[WatchedLayer, ...]
    # The answer may have been computed with it, which rounds differently; the observed run was not.
    flash_attention: bool
    pictures: tuple[HeadAttention, ...]  # the heads that fit a role best
    lens: tuple[LensColumn, ...]  # for positions that chose a token, or for all; empty with a reason in `lens_refused`
    # "", "names" (tensors missing), "norm" (another kind of norm), or "differs" (the lens does not give the model's own
    # logits).
    lens_refused: str
    # Maximum difference between the lens's logits at the last layer and the model's own, relative to their range.
    lens_difference: float
    prefill_seconds: float  # for all observed positions
    decode_seconds: float  # for one position; 0 if unknown


EXPLAIN = JobKind("explain", ExplainRun, Empty, RunCollected, needs_model=True)

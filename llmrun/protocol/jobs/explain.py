"""The job `explain`: what a loaded model did, layer by layer, when it gave the answer that ended last.

All positions are those of the whole sequence, prompt and answer; figures are of the positions that were watched, from
RunCollected.first on. Norms are Euclidean lengths of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmrun.protocol.jobs import Empty, JobKind
from llmrun.protocol.jobs.tokenize import VocabularyPiece


@dataclass(frozen=True, slots=True)
class ExplainRun:
    """What to look at.

    Attributes:
        answer: the request that was answered.
        everywhere: the logit lens for each position that is watched, not only for those that chose a token.
    """

    answer: int
    everywhere: bool = False


class HeadFigures(NamedTuple):
    """What an attention head does on average.

    Attributes:
        previous: share of its attention that the token before gets.
        first: share that the first token gets.
        spread: entropy over that of looking at all tokens alike, 0 to 1.
    """

    previous: float
    first: float
    spread: float


@dataclass(frozen=True, slots=True)
class WatchedLayer:
    """One layer. Tuples are empty where the model has nothing of that name.

    Attributes:
        residual: norm of each position's vector in the residual stream behind the layer.
        attention: norm of what attention added to it.
        feed_forward: norm of what the feed-forward part added.
        heads: in order.
        experts: which ones each position woke, the heaviest first.
        prefill_seconds: for all watched positions together; 0 where that can't be told.
        decode_seconds: for a single one; 0 where that can't be told.
    """

    residual: tuple[float, ...] = ()
    attention: tuple[float, ...] = ()
    feed_forward: tuple[float, ...] = ()
    heads: tuple[HeadFigures, ...] = ()
    experts: tuple[tuple[int, ...], ...] = ()
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """The attention of one head.

    Attributes:
        role: what it was chosen for: "previous", "first", "spread" or "sharp".
        layer, head: which it is, from 0 on.
        rows: of each watched position, the shares of positions 0 to its own.
    """

    role: str
    layer: int
    head: int
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class LensCell:
    """What the model would say if it ended behind a layer.

    Attributes:
        layer: from 0 on.
        candidates: ids of the likeliest tokens, the likeliest first.
        probabilities: theirs.
        next: probability of the token that really came next; 0 where none did.
        rank: how many tokens are likelier than that one; -1 where none came.
    """

    layer: int
    candidates: tuple[int, ...]
    probabilities: tuple[float, ...]
    next: float
    rank: int


@dataclass(frozen=True, slots=True)
class LensColumn:
    """The logit lens at one position, from the first layer to the last.

    Attributes:
        position: whose vector is looked at; it predicts the token behind it.
        next: probability that the model itself gave to that token; 0 where none came.
        cells: of the layers.
    """

    position: int
    next: float
    cells: tuple[LensCell, ...]


class Neighbour(NamedTuple):
    """A token of the vocabulary whose embedding points nearly the same way as another's.

    Attributes:
        token: its id.
        similarity: cosine of the angle between them.
        x, y: see EmbeddedToken.
    """

    token: int
    similarity: float
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class EmbeddedToken:
    """Where a token's embedding lies.

    Attributes:
        token: its id.
        x, y: in the plane that shows most of how these tokens' embeddings differ (PCA).
        neighbours: the nearest of the whole vocabulary; none of a control token, nor are any of those among them.
    """

    token: int
    x: float
    y: float
    neighbours: tuple[Neighbour, ...]


@dataclass(frozen=True, slots=True)
class EmbeddingPlane:
    """The input embeddings of the watched tokens.

    Attributes:
        width: numbers that one has.
        shown: share of their variance that the plane shows.
        tokens: each once.
    """

    width: int
    shown: float
    tokens: tuple[EmbeddedToken, ...]


@dataclass(frozen=True, slots=True)
class RunCollected:
    """What was seen.

    Attributes:
        tokens: of prompt and answer.
        pieces: what they, and the lens's candidates, stand for.
        n_prompt: how many of the tokens are the prompt.
        first: first position that was watched.
        embedding: norms of the watched positions' vectors before the first layer.
        embeddings: where the watched tokens lie in the embedding matrix; None where the file has none.
        layers: in order.
        flash_attention: the answer may have been computed with it, which rounds otherwise; what was watched was not.
        pictures: heads worth looking at.
        lens: for positions that chose a token, or for all; empty where `lens_refused` says why.
        lens_refused: "" or "names", "norm", "differs": what the lens stands on is missing, of another kind, or does not
            give the model's own logits.
        lens_difference: largest one between its logits at the last layer and the model's own, over their range.
        prefill_seconds: to compute all watched positions.
        decode_seconds: to compute a single one; 0 where that can't be told.
    """

    tokens: tuple[int, ...]
    pieces: tuple[VocabularyPiece, ...]
    n_prompt: int
    first: int
    embedding: tuple[float, ...]
    embeddings: EmbeddingPlane | None
    layers: tuple[WatchedLayer, ...]
    flash_attention: bool
    pictures: tuple[HeadAttention, ...]
    lens: tuple[LensColumn, ...]
    lens_refused: str
    lens_difference: float
    prefill_seconds: float
    decode_seconds: float


EXPLAIN = JobKind("explain", ExplainRun, Empty, RunCollected, needs_model=True)

"""Explanations from the model's matrices: the logit lens, and the plane of the tokens' embeddings.

The logit lens gives the predictions of a model if it ended after an earlier layer; the method is nostalgebraist's,
https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru. Models differ in the steps after the last layer: unless the lens
gives the model's own logits there, it is not shown. Large matrices are used in chunks: all logits of all layers would
take gigabytes. The nearest neighbours of an embedding are exact: every row is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmrun.engine.jobs.file_weights import FileWeights
from llmrun.engine.llama.base import Vocabulary
from llmrun.engine.llama.quants import Array
from llmrun.gguf.header import Tensor
from llmrun.protocol.jobs.explain import EmbeddedToken, EmbeddingPlane, LensCell, LensColumn, Neighbour

_CANDIDATES = 5
_NONE = -1  # instead of the next token at the end of the sequence
_MAX_DIFFERENCE = 0.03  # relative to the range of the logits; ggml rounds activations to 8 bits
_NEIGHBOURS = 5
_NO_NEIGHBOUR = -2.0  # less than any cosine
_NEAREST = 64  # nearest rows to search, because some are not text
_CONTROL_TOKENS = 16  # examples of rows that training hardly changed


class Lens:
    """The logit lens of one model.

    Attributes:
        refused: reason for an empty result, see RunCollected.lens_refused.
        difference: see RunCollected.lens_difference.
    """

    def __init__(self, weights: FileWeights) -> None:
        self._weights = weights
        self._norm = weights.find("output_norm.weight", "token_embd_norm.weight")  # the second is LFM2's name
        self._matrix = weights.find("output.weight", "token_embd.weight")
        header = weights.header
        self._epsilon = header.model_number("attention.layer_norm_rms_epsilon")
        scale = header.model_number("logit_scale") or 1.0
        self._scale = 1 / scale if header.architecture.startswith("granite") else scale
        self._cap = header.model_number("final_logit_softcapping")
        self.difference = 0.0
        self.refused = "" if self._norm and self._matrix else "names"
        if self._epsilon is None or weights.find("output_norm.bias"):
            self.refused = self.refused or "norm"

    def columns(
        self, streams: Mapping[int, Array], model_logits: Array, positions: Sequence[int], tokens: Sequence[int]
    ) -> tuple[LensColumn, ...]:
        """Return each position's predictions after each layer; () with a reason in `refused`.

        Args:
            streams: layer -> float32 [positions, width].
            model_logits: the model's logits, float32 [positions, vocabulary].
            positions: their places in the sequence.
            tokens: the whole sequence.
        """
        if not self.refused and not streams:
            self.refused = "names"
        if self.refused:
            return ()
        layers = sorted(streams)
        targets = np.array([tokens[position + 1] if position + 1 < len(tokens) else _NONE for position in positions])
        vectors = np.concatenate([streams[layer] for layer in layers])
        figures = self._compute(vectors, np.tile(targets, len(layers)), model_logits)
        self.difference = figures.difference / (float(np.ptp(model_logits)) or 1.0)
        if not self.difference <= _MAX_DIFFERENCE:
            self.refused = "differs"
            return ()
        columns = []
        for place, position in enumerate(positions):
            cells = tuple(figures.cell(layer, at * len(positions) + place) for at, layer in enumerate(layers))
            columns.append(LensColumn(position, _probability(model_logits[place], targets[place]), cells))
        return tuple(columns)

    def _compute(self, vectors: Array, targets: Array, model_logits: Array) -> _LogitFigures:
        """Apply the model's last steps to vectors; `model_logits` are the model's logits for the last of them."""
        assert self._norm is not None
        assert self._matrix is not None
        scale = np.sqrt((vectors * vectors).mean(axis=1, keepdims=True) + self._epsilon)
        normed = (vectors / scale * self._weights.rows(self._norm)[0]).astype(np.float32)
        rows = {
            token: self._weights.rows(self._matrix, token, token + 1)[0] for token in set(targets[targets != _NONE])
        }
        logits = [vector @ rows[token] if token in rows else 0.0 for token, vector in zip(targets, normed, strict=True)]
        figures = _LogitFigures(targets, self._scaled(np.array(logits, np.float32)))
        for start, chunk in self._weights.chunks(self._matrix, len(vectors)):
            figures.add(start, self._scaled(normed @ chunk.T), model_logits[:, start : start + len(chunk)])
        return figures

    def _scaled(self, logits: Array) -> Array:
        """Apply the scale and the soft cap that some models have."""
        scaled = logits if self._scale == 1 else logits * self._scale
        return np.tanh(scaled / self._cap) * self._cap if self._cap else scaled


class _LogitFigures:
    """The figures of each vector's logits, computed in chunks of tokens.

    Args:
        targets: each vector's actual next token, or _NONE.
        logits: its logit.

    Attributes:
        difference: maximum difference from the model's own logits.
    """

    def __init__(self, targets: Array, logits: Array) -> None:
        self.difference = 0.0
        self._targets, self._logits = targets, logits
        self._highest = TopK(len(targets), _CANDIDATES)
        self._ranks = np.zeros(len(targets), np.int64)
        self._maximum = np.full(len(targets), -np.inf, np.float32)
        self._sum = np.zeros(len(targets))  # of exp(logit - maximum)

    def add(self, start: int, logits: Array, model_logits: Array) -> None:
        """Add the logits of tokens from `start` on, float32 [vectors, tokens]; and the model's own for the last."""
        self.difference = float(np.maximum(self.difference, np.abs(logits[-len(model_logits) :] - model_logits).max()))
        self._highest.take(start, logits)
        before, self._maximum = self._maximum, np.maximum(self._maximum, logits.max(1))
        self._sum = self._sum * np.exp(before - self._maximum) + np.exp(logits - self._maximum[:, None]).sum(1)
        likelier = logits > self._logits[:, None]
        inside = np.flatnonzero((start <= self._targets) & (self._targets < start + logits.shape[1]))
        likelier[inside, self._targets[inside] - start] = False  # its own logit may differ by rounding
        self._ranks += likelier.sum(1)

    def cell(self, layer: int, at: int) -> LensCell:
        """Return the figures of one vector."""
        has_target = self._targets[at] != _NONE
        return LensCell(
            layer,
            tuple(self._highest.columns[at].tolist()),
            tuple(self._probabilities(self._highest.numbers[at], at).tolist()),
            float(self._probabilities(self._logits[at], at)) if has_target else 0.0,
            int(self._ranks[at]) if has_target else -1,
        )

    def _probabilities(self, logits: Array, at: int) -> Array:
        return np.exp(logits - self._maximum[at]) / self._sum[at]


def _probability(logits: Array, token: int) -> float:
    """Return a token's probability; 0 for _NONE."""
    exponentials = np.exp(logits - logits.max())
    return 0.0 if token == _NONE else float(exponentials[token] / exponentials.sum())


def embedding_plane(weights: FileWeights, vocabulary: Vocabulary, tokens: Sequence[int]) -> EmbeddingPlane | None:
    """Return the plane of these tokens, each once; None if the file has no embedding matrix.

    A row nearer to a control token than to a token of the text is not that token's neighbour: rows that training hardly
    changed lie close together, control tokens among them, and would be near every rare word.
    """
    matrix = weights.find("token_embd.weight")
    if matrix is None:
        return None
    distinct = list(dict.fromkeys(tokens))
    rows = _rows(weights, matrix, distinct)
    control = _directions(_rows(weights, matrix, _control_tokens(vocabulary)))
    nearest = TopK(len(distinct), _NEAREST)
    directions = _directions(rows)
    for start, chunk in weights.chunks(matrix, len(distinct)):
        vocabulary_directions = _directions(chunk).T
        cosines = directions @ vocabulary_directions
        nearest.take(
            start, np.where(cosines > (control @ vocabulary_directions).max(axis=0, initial=-1), cosines, _NO_NEIGHBOUR)
        )
    plane = _Plane(rows)
    embedded = []
    for at, token in enumerate(distinct):
        pairs = zip(nearest.columns[at].tolist(), nearest.numbers[at].tolist(), strict=True)
        texts = [pair for pair in pairs if pair[0] != token and pair[1] > _NO_NEIGHBOUR and vocabulary.piece(pair[0])]
        texts = texts[:_NEIGHBOURS] if vocabulary.piece(token) else []
        neighbours = (
            Neighbour(near, cosine, *plane(weights.rows(matrix, near, near + 1)[0])) for near, cosine in texts
        )
        embedded.append(EmbeddedToken(token, *plane(rows[at]), tuple(neighbours)))
    return EmbeddingPlane(rows.shape[1], plane.share, tuple(embedded))


def _control_tokens(vocabulary: Vocabulary) -> list[int]:
    texts = vocabulary.control_texts[:_CONTROL_TOKENS]
    tokens = (token for text in texts for token in vocabulary.tokenize(text, special=True))
    return [token for token in tokens if not vocabulary.piece(token)]


def _rows(weights: FileWeights, matrix: Tensor, tokens: Sequence[int]) -> Array:
    rows = (weights.rows(matrix, token, token + 1) for token in tokens)
    return np.concatenate([np.empty((0, matrix.shape[0]), np.float32), *rows])


def _directions(rows: Array) -> Array:
    """Normalize vectors to length 1; zeros stay."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)


class _Plane:
    """The plane of the first two principal components of some vectors.

    Attributes:
        share: share of the variance in the plane, 0 to 1.
    """

    def __init__(self, rows: Array) -> None:
        self._middle = rows.mean(axis=0)
        _, lengths, axes = np.linalg.svd(rows - self._middle, full_matrices=False)
        # The sign of an axis is arbitrary: make its largest element positive.
        axes = axes[:2] * np.sign(np.take_along_axis(axes[:2], np.abs(axes[:2]).argmax(1)[:, None], 1))
        self._axes = np.zeros((2, rows.shape[1]))  # a single token gives fewer than two axes
        self._axes[: len(axes)] = axes
        variances = lengths**2
        self.share = float(variances[:2].sum() / (variances.sum() or 1.0))

    def __call__(self, vector: Array) -> tuple[float, float]:
        """Return a vector's coordinates in the plane."""
        x, y = self._axes @ (vector - self._middle)
        return float(x), float(y)


class TopK:
    """The highest numbers of each row of a matrix that is computed in chunks of columns.

    Attributes:
        numbers: float32 [rows, up to count], the highest first.
        columns: int64 of the same shape: their columns.
    """

    def __init__(self, n_rows: int, count: int) -> None:
        self.numbers: Array = np.empty((n_rows, 0), np.float32)
        self.columns: Array = np.empty((n_rows, 0), np.int64)
        self._count = count

    def take(self, start: int, numbers: Array) -> None:
        """Add the next columns, from column `start` on: float32 [rows, columns]."""
        count = min(self._count, numbers.shape[1])
        places = np.sort(np.argpartition(-numbers, count - 1, axis=1)[:, :count], axis=1)
        numbers = np.concatenate([self.numbers, np.take_along_axis(numbers, places, 1)], axis=1)
        columns = np.concatenate([self.columns, places + start], axis=1)
        order = np.argsort(-numbers, axis=1, kind="stable")[:, : self._count]
        self.numbers, self.columns = (np.take_along_axis(table, order, 1) for table in (numbers, columns))

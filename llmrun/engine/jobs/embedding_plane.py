"""Input embeddings of a text's tokens: their projection on a plane, and their nearest neighbours in the vocabulary.

Owns the computation on the embedding matrix. The neighbours are exact: every row is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmrun.engine.jobs.file_weights import FileWeights, TopK
from llmrun.engine.llama.base import Vocabulary
from llmrun.engine.llama.quants import Array
from llmrun.gguf.header import Tensor
from llmrun.protocol.jobs.explain import EmbeddedToken, EmbeddingPlane, Neighbour

_NEIGHBOURS = 5
_NO_NEIGHBOUR = -2.0  # less than any cosine
_NEAREST = 64  # nearest rows to search, because some are not text
_CONTROL_TOKENS = 16  # examples of rows that training hardly changed


def embeddings(weights: FileWeights, vocabulary: Vocabulary, tokens: Sequence[int]) -> EmbeddingPlane | None:
    """Return the plane of these tokens, each once; None if the file has no embedding matrix.

    A row nearer to a control token than to a token of the text is not that token's neighbour: rows that training hardly
    changed lie close together, control tokens among them, and would be near every rare word.
    """
    matrix = weights.find("token_embd.weight")
    if matrix is None:
        return None
    own = list(dict.fromkeys(tokens))
    rows = _rows(weights, matrix, own)
    control = _directions(_rows(weights, matrix, _control_tokens(vocabulary)))
    nearest = TopK(len(own), _NEAREST)
    directions = _directions(rows)
    for start, chunk in weights.chunks(matrix, len(own)):
        others = _directions(chunk).T
        cosines = directions @ others
        nearest.take(start, np.where(cosines > (control @ others).max(axis=0, initial=-1), cosines, _NO_NEIGHBOUR))
    plane = _Plane(rows)
    found = []
    for at, token in enumerate(own):
        pairs = zip(nearest.columns[at].tolist(), nearest.numbers[at].tolist(), strict=True)
        texts = [pair for pair in pairs if pair[0] != token and pair[1] > _NO_NEIGHBOUR and vocabulary.piece(pair[0])]
        texts = texts[:_NEIGHBOURS] if vocabulary.piece(token) else []
        neighbours = (
            Neighbour(near, cosine, *plane(weights.rows(matrix, near, near + 1)[0])) for near, cosine in texts
        )
        found.append(EmbeddedToken(token, *plane(rows[at]), tuple(neighbours)))
    return EmbeddingPlane(rows.shape[1], plane.share, tuple(found))


def _control_tokens(vocabulary: Vocabulary) -> list[int]:
    texts = vocabulary.control_texts[:_CONTROL_TOKENS]
    found = (token for text in texts for token in vocabulary.tokenize(text, special=True))
    return [token for token in found if not vocabulary.piece(token)]


def _rows(weights: FileWeights, matrix: Tensor, tokens: Sequence[int]) -> Array:
    found = [weights.rows(matrix, token, token + 1) for token in tokens]
    return np.concatenate([np.empty((0, matrix.shape[0]), np.float32), *found])


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

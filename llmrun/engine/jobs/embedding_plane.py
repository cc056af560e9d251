"""Input embeddings: where a text's tokens lie in the space that the model begins in, and what lies near them.

Owns what is computed of the embedding matrix. The nearest tokens are exact: each row of the vocabulary is looked at.
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
_LOOKED_THROUGH = 64  # of the nearest rows: some are no text
_CONTROL_TOKENS = 16  # that show where training left the rows that it hardly touched


def embeddings(weights: FileWeights, vocabulary: Vocabulary, tokens: Sequence[int]) -> EmbeddingPlane | None:
    """Where tokens lie, each once; None where the file has no such matrix.

    A row nearer to a control token than to a token of the text is not among that token's neighbours: rows that training
    hardly touched lie together, control tokens among them, and would be near to every rare word.
    """
    matrix = weights.find("token_embd.weight")
    if matrix is None:
        return None
    own = list(dict.fromkeys(tokens))
    rows = _rows(weights, matrix, own)
    control = _directions(_rows(weights, matrix, _control_tokens(vocabulary)))
    nearest = TopK(len(own), _LOOKED_THROUGH)
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
    """Vectors of length 1; zeros stay."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)


class _Plane:
    """The plane that shows most of how vectors differ (principal component analysis).

    Attributes:
        share: of their variance that it shows, 0 to 1.
    """

    def __init__(self, rows: Array) -> None:
        self._middle = rows.mean(axis=0)
        _, lengths, axes = np.linalg.svd(rows - self._middle, full_matrices=False)
        # An axis has no direction of its own: its largest element points up.
        axes = axes[:2] * np.sign(np.take_along_axis(axes[:2], np.abs(axes[:2]).argmax(1)[:, None], 1))
        self._axes = np.zeros((2, rows.shape[1]))  # one token has a place, but no axis
        self._axes[: len(axes)] = axes
        variances = lengths**2
        self.share = float(variances[:2].sum() / (variances.sum() or 1.0))

    def __call__(self, vector: Array) -> tuple[float, float]:
        """A vector's place."""
        x, y = self._axes @ (vector - self._middle)
        return float(x), float(y)

"""The logit lens: the predictions of a model if it ended after an earlier layer.

Owns the last norm and the output matrix, which is used in chunks: all logits of all layers would take gigabytes. The
method is nostalgebraist's, https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru. Models differ in the steps after the last
layer: unless the lens gives the model's own logits there, it is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmrun.engine.jobs.file_weights import FileWeights, TopK
from llmrun.engine.llama.quants import Array
from llmrun.protocol.jobs.explain import LensCell, LensColumn

_CANDIDATES = 5
_NONE = -1  # instead of the next token at the end of the sequence
_MAX_DIFFERENCE = 0.03  # relative to the range of the logits; ggml rounds activations to 8 bits


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
        self, streams: Mapping[int, Array], own: Array, positions: Sequence[int], tokens: Sequence[int]
    ) -> tuple[LensColumn, ...]:
        """Return each position's predictions after each layer; () with a reason in `refused`.

        Args:
            streams: layer -> float32 [positions, width].
            own: the model's logits, float32 [positions, vocabulary].
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
        figures = self._compute(vectors, np.tile(targets, len(layers)), own)
        self.difference = figures.difference / (float(np.ptp(own)) or 1.0)
        if not self.difference <= _MAX_DIFFERENCE:
            self.refused = "differs"
            return ()
        columns = []
        for place, position in enumerate(positions):
            cells = tuple(figures.cell(layer, at * len(positions) + place) for at, layer in enumerate(layers))
            columns.append(LensColumn(position, _probability(own[place], targets[place]), cells))
        return tuple(columns)

    def _compute(self, vectors: Array, targets: Array, own: Array) -> _LogitFigures:
        """Apply the model's last steps to vectors; `own` are the model's logits for the last of them."""
        assert self._norm is not None
        assert self._matrix is not None
        scale = np.sqrt((vectors * vectors).mean(axis=1, keepdims=True) + self._epsilon)
        normed = (vectors / scale * self._weights.rows(self._norm)[0]).astype(np.float32)
        rows = {
            token: self._weights.rows(self._matrix, token, token + 1)[0] for token in set(targets[targets != _NONE])
        }
        logits = [each @ rows[token] if token in rows else 0.0 for token, each in zip(targets, normed, strict=True)]
        figures = _LogitFigures(targets, self._scaled(np.array(logits, np.float32)))
        for start, chunk in self._weights.chunks(self._matrix, len(vectors)):
            figures.add(start, self._scaled(normed @ chunk.T), own[:, start : start + len(chunk)])
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

    def add(self, start: int, logits: Array, own: Array) -> None:
        """Add the logits of tokens from `start` on, float32 [vectors, tokens]; `own` are the model's of the last."""
        self.difference = float(np.maximum(self.difference, np.abs(logits[-len(own) :] - own).max()))
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

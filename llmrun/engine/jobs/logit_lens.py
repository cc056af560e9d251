"""The logit lens: what a model would say if it ended behind an earlier layer.

Owns the last norm and the output matrix, a few rows of which are used at a time: all logits of all layers would take
gigabytes. The idea is nostalgebraist's, https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru. A model may do more to its
logits than this knows of, or less: so the lens has to give the model's own logits behind the last layer, or nothing is
shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmrun.engine.jobs.file_weights import FileWeights, TopK
from llmrun.engine.llama.quants import Array
from llmrun.protocol.jobs.explain import LensCell, LensColumn

_CANDIDATES = 5
_NONE = -1  # for the token that came next, where none did
_MOST_DIFFERENCE = 0.03  # over the range of the logits; activations are rounded to 8 bits for the model's own


class Lens:
    """Reads the residual stream of one model.

    Attributes:
        refused: why there is no lens, see RunCollected.lens_refused.
        difference: see RunCollected.lens_difference.
    """

    def __init__(self, weights: FileWeights) -> None:
        self._weights = weights
        self._norm = weights.find("output_norm.weight", "token_embd_norm.weight")  # the second is LFM2's name of it
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
        """What each position would say behind each layer; () where that can't be shown.

        Args:
            streams: layer -> float32 [positions, width].
            own: the model's logits, float32 [positions, vocabulary].
            positions: which those are.
            tokens: the whole sequence.
        """
        if not self.refused and not streams:
            self.refused = "names"
        if self.refused:
            return ()
        layers = sorted(streams)
        came = np.array([tokens[position + 1] if position + 1 < len(tokens) else _NONE for position in positions])
        reading = self._read(np.concatenate([streams[layer] for layer in layers]), np.tile(came, len(layers)), own)
        self.difference = reading.difference / (float(np.ptp(own)) or 1.0)
        if not self.difference <= _MOST_DIFFERENCE:
            self.refused = "differs"
            return ()
        found = []
        for place, position in enumerate(positions):
            cells = tuple(reading.cell(layer, at * len(positions) + place) for at, layer in enumerate(layers))
            found.append(LensColumn(position, _share(own[place], came[place]), cells))
        return tuple(found)

    def _read(self, vectors: Array, came: Array, own: Array) -> _Reading:
        """What the model's end makes of vectors; of the last ones it made `own`."""
        assert self._norm is not None
        assert self._matrix is not None
        scale = np.sqrt((vectors * vectors).mean(axis=1, keepdims=True) + self._epsilon)
        normed = (vectors / scale * self._weights.rows(self._norm)[0]).astype(np.float32)
        rows = {token: self._weights.rows(self._matrix, token, token + 1)[0] for token in set(came[came != _NONE])}
        targets = [each @ rows[token] if token in rows else 0.0 for token, each in zip(came, normed, strict=True)]
        reading = _Reading(came, self._ended(np.array(targets, np.float32)))
        for start, chunk in self._weights.chunks(self._matrix, len(vectors)):
            reading.take(start, self._ended(normed @ chunk.T), own[:, start : start + len(chunk)])
        return reading

    def _ended(self, logits: Array) -> Array:
        """What some models do to their logits at last."""
        scaled = logits if self._scale == 1 else logits * self._scale
        return np.tanh(scaled / self._cap) * self._cap if self._cap else scaled


class _Reading:
    """What is kept of each vector's logits while they pass by.

    Args:
        came: the token that really came next, or none.
        logits: its logit.

    Attributes:
        difference: the largest one from the model's own logits.
    """

    def __init__(self, came: Array, logits: Array) -> None:
        self.difference = 0.0
        self._came, self._logits = came, logits
        self._highest = TopK(len(came), _CANDIDATES)
        self._likelier = np.zeros(len(came), np.int64)
        self._most = np.full(len(came), -np.inf, np.float32)
        self._sum = np.zeros(len(came))  # of exp(logit - most)

    def take(self, start: int, logits: Array, own: Array) -> None:
        """The logits of some tokens, from this one on, float32 [vectors, tokens]; and the model's own of the last."""
        self.difference = float(np.maximum(self.difference, np.abs(logits[-len(own) :] - own).max()))
        self._highest.take(start, logits)
        before, self._most = self._most, np.maximum(self._most, logits.max(1))
        self._sum = self._sum * np.exp(before - self._most) + np.exp(logits - self._most[:, None]).sum(1)
        likelier = logits > self._logits[:, None]
        here = np.flatnonzero((start <= self._came) & (self._came < start + logits.shape[1]))
        likelier[here, self._came[here] - start] = False  # computed another way, it may seem likelier than itself
        self._likelier += likelier.sum(1)

    def cell(self, layer: int, at: int) -> LensCell:
        """What one of the vectors says."""
        came = self._came[at] != _NONE
        return LensCell(
            layer,
            tuple(self._highest.columns[at].tolist()),
            tuple(self._share(self._highest.numbers[at], at).tolist()),
            float(self._share(self._logits[at], at)) if came else 0.0,
            int(self._likelier[at]) if came else -1,
        )

    def _share(self, logits: Array, at: int) -> Array:
        return np.exp(logits - self._most[at]) / self._sum[at]


def _share(logits: Array, token: int) -> float:
    """Probability of a token; 0 of none."""
    shares = np.exp(logits - logits.max())
    return 0.0 if token == _NONE else float(shares[token] / shares.sum())

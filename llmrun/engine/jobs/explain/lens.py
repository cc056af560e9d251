"""The logit lens: what a model would say if it ended behind an earlier layer.

Owns the last norm and the output matrix, read from the model's file, never from memory, where weights may be repacked.
The idea is nostalgebraist's, https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru. A model may do more to its logits than
this knows of, or less: so the lens has to give the model's own logits behind the last layer, or nothing is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from llmrun.engine.llama.quants import Array, Quants
from llmrun.gguf.header import Header, Tensor
from llmrun.gguf.reader import read_header
from llmrun.gguf.split import other_parts
from llmrun.protocol.jobs.explain import LensCell, LensColumn

_ROWS = 4096  # of the output matrix at a time
_CANDIDATES = 5
_MOST_DIFFERENCE = 0.03  # over the range of the logits; activations are rounded to 8 bits for the model's own


class Lens:
    """Reads the residual stream of one model.

    Attributes:
        refused: why there is no lens, see RunCollected.lens_refused.
        difference: see RunCollected.lens_difference.
    """

    def __init__(self, path: str, threads: int) -> None:
        header = read_header(Path(path))
        tensors = {tensor.name: tensor for tensor in header.tensors}
        self._header, self._quants = header, Quants(threads)
        self._norm = tensors.get("output_norm.weight")
        self._bias = tensors.get("output_norm.bias")
        self._matrix = tensors.get("output.weight") or tensors.get("token_embd.weight")
        self._epsilon = header.model_number("attention.layer_norm_rms_epsilon")
        self.difference = 0.0
        self.refused = "" if self._norm and self._matrix else "names"
        if self._epsilon is None or self._bias is not None:
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
        logits = self._logits(np.concatenate([streams[layer] for layer in layers]))
        logits = logits.reshape(len(layers), len(positions), -1)
        spread = float(np.ptp(own)) or 1.0
        self.difference = float(np.abs(logits[-1] - own).max()) / spread
        if not self.difference <= _MOST_DIFFERENCE:
            self.refused = "differs"
            return ()
        found = []
        for place, position in enumerate(positions):
            token = tokens[position + 1] if position + 1 < len(tokens) else None
            cells = tuple(_cell(layer, logits[at, place], token) for at, layer in enumerate(layers))
            found.append(LensColumn(position, _cell(0, own[place], token).next, cells))
        return tuple(found)

    def _logits(self, vectors: Array) -> Array:
        """What the model's end makes of vectors, float32 [vectors, vocabulary]."""
        assert self._norm is not None
        assert self._matrix is not None
        scale = np.sqrt((vectors * vectors).mean(axis=1, keepdims=True) + self._epsilon)
        normed = (vectors / scale * self._unpacked(self._norm)[0]).astype(np.float32)
        matrix, rows = self._matrix, self._matrix.shape[1]
        chunks = (self._unpacked(matrix, start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS))
        return np.concatenate([normed @ chunk.T for chunk in chunks], axis=1)

    def _unpacked(self, tensor: Tensor, start: int = 0, end: int = 1) -> Array:
        """Rows of a tensor in the file, float32 [rows, columns]."""
        kind, columns = self._quants.numbers[tensor.type.upper()], tensor.shape[0]
        size = self._quants.row_bytes(kind, columns)
        path = _part(self._header, tensor.part)
        data = np.memmap(path, np.uint8, "r", tensor.offset + start * size, (end - start) * size)
        return self._quants.unpack(kind, np.array(data), columns)


def _part(header: Header, number: int) -> Path:
    return header.path.with_name(other_parts(header)[number - 1]) if number else header.path


def _cell(layer: int, logits: Array, token: int | None) -> LensCell:
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    best = np.argpartition(-logits, min(_CANDIDATES, len(logits) - 1))[:_CANDIDATES]
    best = best[np.argsort(-logits[best], kind="stable")]
    return LensCell(
        layer,
        tuple(map(int, best)),
        tuple(float(shares[each]) for each in best),
        0.0 if token is None else float(shares[token]),
        -1 if token is None else int((logits > logits[token]).sum()),
    )

"""Sees what a model computes: the residual stream and what is added to it, attention, experts; and how long that takes.

Owns llama.cpp's names of these (src/models/), which vary a little with the architecture: what has no known name is left
out. Numbers are reduced as they come, because their memory is used again at once, and all attention of a long prompt
would take gigabytes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmrun.engine.llama.quants import Array
from llmrun.engine.llama.tensors import GgmlTensor, TensorNumbers
from llmrun.protocol.jobs.explain import HeadAttention, HeadFigures, WatchedLayer

_COMPUTED = 16  # GGML_TENSOR_FLAG_COMPUTE
_EMBEDDINGS = frozenset({"embd", "model.embed_tokens", "model.input_embed", "inp_scaled"})  # the last is Gemma's second
_RESIDUAL, _ATTENTION, _EXPERTS = "l_out", "kq_soft_max", "ffn_moe_topk"
_BETWEEN = frozenset({"ffn_inp", "sa_out"})  # the residual stream between attention and the feed-forward part
_FEED_FORWARD = "ffn_out"  # where there is no such place
_WANTED = frozenset({_RESIDUAL, _ATTENTION, _EXPERTS, _FEED_FORWARD, *_BETWEEN})
_DIGITS = 5  # of shares


def _layer_of(name: str) -> tuple[str, int]:
    """A node's name without its layer, and the layer; -1 for what is in none."""
    base, _, number = name.rpartition("-")
    return (base, int(number)) if base and number.isdecimal() else (name, -1)


class Stopwatch:
    """Notes when each layer is done.

    Attributes:
        layers: layer -> seconds.
        seconds: of everything.
    """

    def __init__(self) -> None:
        self.layers: dict[int, float] = {}
        self.seconds = 0.0
        self._began = self._last = 0.0

    def watch(self, tensor: GgmlTensor, ask: bool) -> bool:
        """See llmrun.engine.llama.context.Watch."""
        if not self._began:
            self._began = self._last = time.perf_counter()
        name, layer = _layer_of(tensor.plain_name)
        if name != _RESIDUAL or layer < 0 or not tensor.flags & _COMPUTED:
            return False
        if not ask:
            now = time.perf_counter()
            self.layers[layer] = now - self._last
            self._last = now
        return True

    def stop(self) -> None:
        """All is computed."""
        self.seconds = time.perf_counter() - self._began


class Collector:
    """Watches one decode of positions first to size - 1.

    Args:
        first: of the positions.
        size: of the whole sequence.
        wanted: places among the watched positions whose residual stream is kept.

    Attributes:
        embedding: see RunCollected.
        kept: layer -> float32 [wanted, width]: the residual stream behind it.
    """

    def __init__(self, first: int, size: int, wanted: Sequence[int]) -> None:
        self.embedding: tuple[float, ...] = ()
        self.kept: dict[int, Array] = {}
        self._first, self._size, self._wanted = first, size, list(wanted)
        self._numbers = TensorNumbers()
        self._layers: dict[int, WatchedLayer] = {}
        self._stream: Array | None = None  # the residual stream as it was seen last
        self._fed: Array | None = None  # what the feed-forward part is about to add to it
        self._best: dict[str, tuple[float, int, int, Array]] = {}  # role -> how well it fits, layer, head, shares

    def watch(self, tensor: GgmlTensor, ask: bool) -> bool:
        """See llmrun.engine.llama.context.Watch."""
        name, layer = _layer_of(tensor.plain_name)
        is_wanted = name in _EMBEDDINGS if layer < 0 else name in _WANTED
        if ask or not is_wanted:
            return is_wanted and bool(tensor.flags & _COMPUTED)
        if layer < 0:
            self._stream = self._rows(tensor)
            self.embedding = _norms(self._stream)
            return True
        seen = self._layers.get(layer) or WatchedLayer()
        if name == _ATTENTION:
            seen = replace(seen, heads=self._attention(layer, self._numbers(tensor)[0]))
        elif name == _EXPERTS:
            chosen = self._numbers(tensor, ctypes.c_int32)[0, 0]
            seen = replace(seen, experts=tuple(tuple(map(int, row)) for row in chosen))
        else:
            seen = self._with_stream(seen, name, layer, self._rows(tensor))
        self._layers[layer] = seen
        return True

    def layers(self) -> list[WatchedLayer]:
        """What was seen, in the order of the layers."""
        return [self._layers.get(number) or WatchedLayer() for number in range(max(self._layers, default=-1) + 1)]

    def pictures(self) -> tuple[HeadAttention, ...]:
        """The heads that fit a role best; each has one role."""
        best = self._best.items()
        return tuple(HeadAttention(role, layer, head, self._shares(rows)) for role, (_, layer, head, rows) in best)

    def _rows(self, tensor: GgmlTensor) -> Array:
        """A vector for each position, copied."""
        return np.array(self._numbers(tensor)[0, 0])

    def _with_stream(self, seen: WatchedLayer, name: str, layer: int, rows: Array) -> WatchedLayer:
        """What came to the residual stream since it was seen last."""
        if name == _FEED_FORWARD:
            self._fed = rows
            return seen
        if name in _BETWEEN:
            return replace(seen, attention=self._added(rows))
        if self._fed is not None and not seen.attention and self._fed.shape == rows.shape:
            seen = replace(seen, attention=self._added(rows - self._fed))
        if len(rows) == self._size - self._first:
            self.kept[layer] = rows[self._wanted]
        self._fed, added = None, self._added(rows)
        return replace(seen, feed_forward=added if seen.attention else (), residual=_norms(rows))

    def _added(self, stream: Array) -> tuple[float, ...]:
        """Norms of what the residual stream has gained, where it has as many positions as before."""
        before, self._stream = self._stream, stream
        return _norms(stream - before) if before is not None and before.shape == stream.shape else ()

    def _attention(self, layer: int, shares: Array) -> tuple[HeadFigures, ...]:
        """What each head does, and which of them are the best examples.

        Args:
            shares: float32 [heads, positions, cells of the KV cache]; a cell is a position, as the cache was empty.
        """
        if shares.shape[1] != self._size - self._first or shares.shape[2] < self._size:
            return ()  # a window that has passed: its cells are used again, for other positions
        shares = shares[:, :, : self._size]
        at = np.arange(self._first, self._size)
        rows = np.arange(len(at))
        previous = shares[:, rows, np.maximum(at - 1, 0)][:, at > 0]
        logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
        entropy = -(shares * logs).sum(axis=2)[:, at > 0] / np.log(at[at > 0] + 1)
        if not previous.shape[1]:
            return ()
        found = [
            HeadFigures(*(round(float(value), _DIGITS) for value in values))
            for values in zip(previous.mean(1), shares[:, at > 0, 0].mean(1), entropy.mean(1), strict=True)
        ]
        for head, figures in enumerate(found):
            self._offer(layer, head, figures, shares[head])
        return tuple(found)

    def _offer(self, layer: int, head: int, figures: HeadFigures, shares: Array) -> None:
        """A head takes the first role that it fits better than all heads before it."""
        rest = 1 - figures.first  # a head that looks at the first token rests, which is no example of anything else
        scores = {
            "previous": figures.previous,
            "first": figures.first,
            "spread": figures.spread,
            "sharp": (1 - figures.spread) * rest * (1 - figures.previous),
        }
        for role, score in scores.items():
            if role not in self._best or score > self._best[role][0]:
                self._best[role] = (score, layer, head, shares.copy())
                return

    def _shares(self, shares: Array) -> tuple[tuple[float, ...], ...]:
        """Rows up to each position itself; what comes after it is masked."""
        return tuple(
            tuple(round(float(share), _DIGITS) for share in row[: self._first + place + 1])
            for place, row in enumerate(shares)
        )


def _norms(rows: Array) -> tuple[float, ...]:
    found: Any = np.linalg.norm(rows, axis=1)
    return tuple(map(float, found))

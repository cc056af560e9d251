"""The job `explain`: recompute an answer's tokens in a second context whose tensors are observed.

The second context uses the same weights, without flash attention, which computes no attention weights. Its logits may
differ in their last digits from the logits of the answer. An evaluation callback collects the residual stream, its
additions, attention and experts, and another one each layer's time. Numbers are reduced at once, because llama.cpp
reuses their memory, and all attention weights of a long prompt take gigabytes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from llmrun import _native
from llmrun.engine.jobs.explain_matrices import Lens, embedding_plane
from llmrun.engine.jobs.file_weights import FileWeights
from llmrun.engine.jobs.scores import logits_at
from llmrun.engine.llama.base import Aborted, Entry, vocabulary_pieces
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.ggml import GgmlTensor, TensorNumbers
from llmrun.engine.llama.parameters import Watch
from llmrun.engine.llama.quants import Array
from llmrun.engine.loaded import LoadedModel
from llmrun.errors import UsageError
from llmrun.protocol.adapters import AdapterScale
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.explain import (
    ExplainRun,
    HeadAttention,
    HeadFigures,
    RunCollected,
    WatchedLayer,
)

WATCHED = 128  # Observed positions at the end of a sequence; logits and attention of more would take much memory
_PLAIN_TYPES = frozenset({"f32", "f16", "bf16"})  # of values; others need flash attention
_REPEATS = 3  # of the timed decode step
_DIGITS = 5  # of attention weights
# llama.cpp's names of tensors (src/models/), which vary a little with the architecture; unknown ones are left out.
_COMPUTED = 16  # GGML_TENSOR_FLAG_COMPUTE
_EMBEDDINGS = frozenset({"embd", "model.embed_tokens", "model.input_embed", "inp_scaled"})  # the last is Gemma's second
_RESIDUAL, _ATTENTION, _EXPERTS = "l_out", "kq_soft_max", "ffn_moe_topk"
_BETWEEN = frozenset({"ffn_inp", "sa_out"})  # the residual stream between attention and the feed-forward part
_FEED_FORWARD = "ffn_out"  # for models with parallel attention and feed-forward parts
_OBSERVED = frozenset({_RESIDUAL, _ATTENTION, _EXPERTS, _FEED_FORWARD, *_BETWEEN})


def run_explain(
    command: ExplainRun, report: Callable[[Empty], None], flag: _native.CancelFlag, loaded: LoadedModel
) -> RunCollected:
    """Explain a finished answer.

    Raises:
        UsageError: it is not remembered any more, or its prompt has images.
        OutOfMemoryError: a second context does not fit.
    """
    answer = loaded.engine.explainable(command.answer)
    if answer.media is not None:
        raise UsageError("an answer about an image can't be explained", why="only tokens can be computed again")
    tokens, n_prompt = list(answer.tokens), answer.n_prompt
    with closing(_Replay(loaded, tokens, answer.adapters)) as replay:
        first = replay.first
        chosen = range(first if command.everywhere else max(first, n_prompt - 1), len(tokens))
        collector = Collector(first, len(tokens), [position - first for position in chosen])
        logits = replay.collect(collector, chosen)
        prefill, decode = replay.timed()
    if flag.is_set:
        raise Aborted
    weights = FileWeights(loaded.weights.header, loaded.load.threads, flag)
    vocabulary = loaded.weights.vocabulary
    lens = Lens(weights)
    columns = lens.columns(collector.streams, logits, chosen, tokens)
    embedded = embedding_plane(weights, vocabulary, tokens[first:])
    shown = [*tokens, *(token for column in columns for cell in column.cells for token in cell.candidates)]
    shown += [near.token for token in embedded.tokens for near in token.neighbours] if embedded else []
    return RunCollected(
        tokens=tuple(tokens),
        pieces=vocabulary_pieces(vocabulary, shown),
        n_prompt=n_prompt,
        first=first,
        embedding=collector.embedding,
        embeddings=embedded,
        layers=_timed_layers(collector.layers(), prefill, decode),
        flash_attention=loaded.load.flash_attention != "off",
        pictures=collector.examples(),
        lens=columns,
        lens_refused=lens.refused,
        lens_difference=lens.difference,
        prefill_seconds=prefill.seconds,
        decode_seconds=decode.seconds,
    )


def _timed_layers(layers: Sequence[WatchedLayer], prefill: Stopwatch, decode: Stopwatch) -> tuple[WatchedLayer, ...]:
    return tuple(
        replace(layer, prefill_seconds=prefill.layers.get(number, 0.0), decode_seconds=decode.layers.get(number, 0.0))
        for number, layer in enumerate(layers)
    )


class _Replay:
    """Repeated computation of a sequence."""

    def __init__(self, loaded: LoadedModel, tokens: list[int], adapters: tuple[AdapterScale, ...]) -> None:
        self._tokens, size = tokens, len(tokens)
        self.first = max(0, size - WATCHED)
        watched = size - self.first
        kv_type_v = loaded.load.kv_type_v if loaded.load.kv_type_v in _PLAIN_TYPES else "f16"
        load = replace(loaded.load_for(size, watched), flash_attention="off", kv_type_v=kv_type_v)
        self._watch: Watch = _ignore
        self._context = LlamaContext(
            loaded.weights, load, n_outputs=watched, watch=lambda tensor, ask: self._watch(tensor, ask)
        )
        self._context.adapt(adapters)

    def close(self) -> None:
        self._context.close()

    def collect(self, collector: Collector, chosen: Sequence[int]) -> Any:
        """Compute with the collector as callback; return the logits of the chosen positions, float32.

        Every position requests logits, or llama.cpp would leave most of them out of the last layer.
        """
        self._fill()
        self._decode(self.first, collector.watch)
        n_vocab = self._context.vocabulary.n_tokens
        addresses = (self._context.logits(position - self.first) for position in chosen)
        return np.array([logits_at(address, n_vocab) for address in addresses])

    def timed(self) -> tuple[Stopwatch, Stopwatch]:
        """Measure the time of the layers: for all observed positions at once, and for the last one alone."""
        if not (self._context.cuts and self._context.forget(0, self.first)):
            self._fill()
        prefill = self._timed_once(self.first)
        last, decodes = len(self._tokens) - 1, []
        for _ in range(_REPEATS if last and self._context.cuts else 0):
            if self._context.forget(0, last):
                decodes.append(self._timed_once(last))
        decodes.sort(key=lambda stopwatch: stopwatch.seconds)
        return prefill, decodes[len(decodes) // 2] if decodes else Stopwatch()

    def _timed_once(self, start: int) -> Stopwatch:
        stopwatch = Stopwatch()
        self._decode(start, stopwatch.watch)
        stopwatch.stop()
        return stopwatch

    def _fill(self) -> None:
        """Fill the KV cache with the tokens before the observed positions."""
        self._context.clear()
        self._watch = _ignore
        for start in range(0, self.first, WATCHED):
            self._decode(start, _ignore, min(start + WATCHED, self.first))

    def _decode(self, start: int, watch: Watch, end: int | None = None) -> None:
        self._watch = watch
        entries = [Entry(token, start + place, 0, end is None) for place, token in enumerate(self._tokens[start:end])]
        self._context.decode(entries)
        self._context.synchronize()


def _ignore(tensor: GgmlTensor, ask: bool) -> bool:
    return False


def _split_layer(name: str) -> tuple[str, int]:
    """Return a tensor's name without its layer, and the layer; -1 for tensors outside of layers."""
    base, _, number = name.rpartition("-")
    return (base, int(number)) if base and number.isdecimal() else (name, -1)


class Stopwatch:
    """The seconds of each layer, and in total."""

    def __init__(self) -> None:
        self.layers: dict[int, float] = {}
        self.seconds = 0.0
        self._began = self._last = 0.0

    def watch(self, tensor: GgmlTensor, ask: bool) -> bool:
        """Note the time of each layer's last tensor; see llama.parameters.Watch."""
        if not self._began:
            self._began = self._last = time.perf_counter()
        name, layer = _split_layer(tensor.plain_name)
        if name != _RESIDUAL or layer < 0 or not tensor.flags & _COMPUTED:
            return False
        if not ask:
            now = time.perf_counter()
            self.layers[layer] = now - self._last
            self._last = now
        return True

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self._began


class Collector:
    """Figures of one decode of positions [first, size).

    Args:
        chosen: indexes among the decoded positions whose residual streams are returned.

    Attributes:
        embedding: see RunCollected.
        streams: layer -> float32 [chosen, width]: the residual stream after it.
    """

    def __init__(self, first: int, size: int, chosen: Sequence[int]) -> None:
        self.embedding: tuple[float, ...] = ()
        self.streams: dict[int, Array] = {}
        self._first, self._size, self._chosen = first, size, list(chosen)
        self._numbers = TensorNumbers()
        self._layers: dict[int, WatchedLayer] = {}
        self._stream: Array | None = None  # the last residual stream
        self._feed_forward: Array | None = None  # output of the feed-forward part that is not yet in the stream
        self._best: dict[str, tuple[float, int, int, Array]] = {}  # role -> score, layer, head, attention weights

    def watch(self, tensor: GgmlTensor, ask: bool) -> bool:
        """Collect a tensor's figures; see llama.parameters.Watch."""
        name, layer = _split_layer(tensor.plain_name)
        is_observed = name in _EMBEDDINGS if layer < 0 else name in _OBSERVED
        if ask or not is_observed:
            return is_observed and bool(tensor.flags & _COMPUTED)
        if layer < 0:
            self._stream = self._rows(tensor)
            self.embedding = _norms(self._stream)
            return True
        figures = self._layers.get(layer) or WatchedLayer()
        if name == _ATTENTION:
            figures = replace(figures, heads=self._attention(layer, self._numbers(tensor)[0]))
        elif name == _EXPERTS:
            active = self._numbers(tensor, ctypes.c_int32)[0, 0]
            figures = replace(figures, experts=tuple(tuple(map(int, row)) for row in active))
        else:
            figures = self._with_stream(figures, name, layer, self._rows(tensor))
        self._layers[layer] = figures
        return True

    def layers(self) -> list[WatchedLayer]:
        return [self._layers.get(number) or WatchedLayer() for number in range(max(self._layers, default=-1) + 1)]

    def examples(self) -> tuple[HeadAttention, ...]:
        """Return the head that fits each role best; each head has one role."""
        best = self._best.items()
        return tuple(HeadAttention(role, layer, head, self._shares(rows)) for role, (_, layer, head, rows) in best)

    def _rows(self, tensor: GgmlTensor) -> Array:
        """Copy the vector of each position."""
        return np.array(self._numbers(tensor)[0, 0])

    def _with_stream(self, figures: WatchedLayer, name: str, layer: int, rows: Array) -> WatchedLayer:
        """Add the norms of the residual stream and of its additions since the last tensor."""
        if name == _FEED_FORWARD:
            self._feed_forward = rows
            return figures
        if name in _BETWEEN:
            return replace(figures, attention=self._added(rows))
        before = self._feed_forward
        if before is not None and not figures.attention and before.shape == rows.shape:
            figures = replace(figures, attention=self._added(rows - before))
        if len(rows) == self._size - self._first:
            self.streams[layer] = rows[self._chosen]
        self._feed_forward, added = None, self._added(rows)
        return replace(figures, feed_forward=added if figures.attention else (), residual=_norms(rows))

    def _added(self, stream: Array) -> tuple[float, ...]:
        """Return the norms of the stream's change; () if the number of positions changed too."""
        before, self._stream = self._stream, stream
        return _norms(stream - before) if before is not None and before.shape == stream.shape else ()

    def _attention(self, layer: int, shares: Array) -> tuple[HeadFigures, ...]:
        """Return the figures of each head; remember the best examples.

        Args:
            shares: float32 [heads, positions, cells of the KV cache]; a cell is a position, as the cache was empty.
        """
        if shares.shape[1] != self._size - self._first or shares.shape[2] < self._size:
            return ()  # a sliding window that has passed: its cells are reused for other positions
        shares = shares[:, :, : self._size]
        at = np.arange(self._first, self._size)
        rows = np.arange(len(at))
        previous = shares[:, rows, np.maximum(at - 1, 0)][:, at > 0]
        logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
        entropy = -(shares * logs).sum(axis=2)[:, at > 0] / np.log(at[at > 0] + 1)
        if not previous.shape[1]:
            return ()
        heads = [
            HeadFigures(*(round(float(value), _DIGITS) for value in values))
            for values in zip(previous.mean(1), shares[:, at > 0, 0].mean(1), entropy.mean(1), strict=True)
        ]
        for head, figures in enumerate(heads):
            self._offer(layer, head, figures, shares[head])
        return tuple(heads)

    def _offer(self, layer: int, head: int, figures: HeadFigures, shares: Array) -> None:
        """Assign a head to the first role that it fits better than all heads before it."""
        rest = 1 - figures.first  # attention to the first token (an attention sink) is no example of another role
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
        """Return the rows up to each position itself; later positions are masked."""
        return tuple(
            tuple(round(float(share), _DIGITS) for share in row[: self._first + place + 1])
            for place, row in enumerate(shares)
        )


def _norms(rows: Array) -> tuple[float, ...]:
    lengths: Any = np.linalg.norm(rows, axis=1)
    return tuple(map(float, lengths))

"""The job `explain`: recompute an answer's tokens in a second context whose tensors are observed.

Owns the order of passes and the result; explain_collector.py observes, logit_lens.py reads the residual stream. The
second context uses the same weights, without flash attention, which computes no attention weights. Its logits may
differ in their last digits from the logits of the answer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from llmrun import _native
from llmrun.engine.jobs.embedding_plane import embeddings
from llmrun.engine.jobs.explain_collector import Collector, Stopwatch
from llmrun.engine.jobs.file_weights import FileWeights
from llmrun.engine.jobs.logit_lens import Lens
from llmrun.engine.jobs.tokenize import pieces
from llmrun.engine.llama.base import Aborted, Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.tensors import GgmlTensor
from llmrun.engine.llama.watch import Watch
from llmrun.engine.loaded import LoadedModel
from llmrun.errors import UsageError
from llmrun.protocol.adapters import AdapterScale
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.explain import ExplainRun, RunCollected, WatchedLayer

WATCHED = 128  # Observed positions at the end of a sequence; logits and attention of more would take much memory
_PLAIN_TYPES = frozenset({"f32", "f16", "bf16"})  # of values; others need flash attention
_REPEATS = 3  # of the timed decode step


def run(
    command: ExplainRun, report: Callable[[Empty], None], flag: _native.CancelFlag, loaded: LoadedModel
) -> RunCollected:
    """Explain a finished answer.

    Raises:
        UsageError: its KV state was reused, or its prompt has images.
        OutOfMemoryError: a second context does not fit.
    """
    answer = loaded.engine.finished(command.answer)
    if answer.extras.images is not None:
        raise UsageError("an answer about an image can't be explained", why="only tokens can be computed again")
    tokens, n_prompt = list(answer.tokens), answer.n_prompt
    with closing(_Replay(loaded, tokens, answer.extras.adapters)) as replay:
        first = replay.first
        chosen = range(first if command.everywhere else max(first, n_prompt - 1), len(tokens))
        collector = Collector(first, len(tokens), [position - first for position in chosen])
        logits = replay.collect(collector, chosen)
        prefill, decode = replay.timed()
    if flag.is_set:
        raise Aborted
    weights, vocabulary = FileWeights(loaded.weights.header, loaded.load.threads), loaded.weights.vocabulary
    lens = Lens(weights)
    columns = lens.columns(collector.streams, logits, chosen, tokens)
    embedded = embeddings(weights, vocabulary, tokens[first:])
    shown = [*tokens, *(token for column in columns for cell in column.cells for token in cell.candidates)]
    shown += [near.token for each in embedded.tokens for near in each.neighbours] if embedded else []
    return RunCollected(
        tokens=tuple(tokens),
        pieces=pieces(vocabulary, shown),
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
        load = replace(
            loaded.load,
            n_ctx=max(size, loaded.load.n_ctx if loaded.weights.rope_depends_on_window else 0),
            n_ctx_start=size,
            n_batch=watched,
            n_ubatch=watched,
            n_seq_max=1,
            n_parked=0,
            n_cells=0,
            warm_up=False,
            flash_attention="off",
            kv_type_v=loaded.load.kv_type_v if loaded.load.kv_type_v in _PLAIN_TYPES else "f16",
        )
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
        import numpy as np

        self._fill()
        self._decode(self.first, collector.watch)
        n_vocab = self._context.vocabulary.n_tokens
        rows = []
        for position in chosen:
            memory: Any = (ctypes.c_float * n_vocab).from_address(self._context.logits(position - self.first))
            rows.append(np.frombuffer(memory, np.float32).copy())
        return np.array(rows)

    def timed(self) -> tuple[Stopwatch, Stopwatch]:
        """Measure the time of the layers: for all observed positions at once, and for the last one alone."""
        if not (self._context.cuts and self._context.forget(0, self.first)):
            self._fill()
        prefill = self._timed_once(self.first)
        last, decodes = len(self._tokens) - 1, []
        for _ in range(_REPEATS if last and self._context.cuts else 0):
            if self._context.forget(0, last):
                decodes.append(self._timed_once(last))
        decodes.sort(key=lambda each: each.seconds)
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

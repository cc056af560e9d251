"""Sequences of tokens become vectors: which of them go through the model together, and the context they do it in.

Owns that context; must not know texts. Every batch stands alone: nothing of it stays in the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from llmrun.engine.llama.base import Aborted, Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.errors import CancelledError
from llmrun.gguf.pooling import is_encoder

if TYPE_CHECKING:
    from llmrun.engine.llama.model import LlamaModel
    from llmrun.protocol.loading import Load

BATCH_TOKENS = 512
"""Tokens of short texts that go through the model together: attention over more would cost more than it saves."""
BATCH_TEXTS = 64


def batches(lengths: Sequence[int], most_tokens: int, most_texts: int) -> Iterator[range]:
    """Which sequences go together, in their order: as many as may; one that is longer goes alone."""
    start = tokens = 0
    for index, length in enumerate(lengths):
        if index > start and (tokens + length > most_tokens or index - start == most_texts):
            yield range(start, index)
            start, tokens = index, 0
        tokens += length
    if start < len(lengths):
        yield range(start, len(lengths))


class Embedder:
    """Makes vectors with a loaded model; what it needs for that is made when it is first used."""

    def __init__(self, weights: LlamaModel, load: Load) -> None:
        """Over these weights, loaded so."""
        self._weights, self._load = weights, load
        self._context: LlamaContext | None = None
        self._made_for = ("", 0)

    @cached_property
    def _is_encoder(self) -> bool:
        return is_encoder(self._weights.header)

    @property
    def n_ctx(self) -> int:
        """Most tokens of a sequence. An encoder has vectors for no more positions than it was trained on."""
        return min(self._load.n_ctx, self._weights.n_ctx_train) if self._is_encoder else self._load.n_ctx

    def embed(self, sequences: Sequence[Sequence[int]], pooling: str) -> list[bytes]:
        """The vector of each sequence, as float32; with a ranking head its scores.

        Args:
            sequences: token ids; none is empty or longer than n_ctx.
            pooling: as in EmbedTexts.

        Raises:
            CancelledError: the flag was set.
            OutOfMemoryError: there is no memory for the longest of them.
            DecodeError: llama.cpp could not.
        """
        lengths = [len(tokens) for tokens in sequences]
        # Only the last token's vector is wanted, and only what stands before it counts: a piece at a time will do.
        in_pieces = pooling == "last" and not self._is_encoder
        needed = BATCH_TOKENS if in_pieces else max(BATCH_TOKENS, *lengths)
        context = self._context_for(pooling, _rounded(min(needed, self.n_ctx)))
        vectors: list[bytes] = []
        for chosen in batches(lengths, min(context.n_batch, BATCH_TOKENS), context.n_seq_max):
            entries = [
                Entry(token, position, index - chosen.start, True)
                for index in chosen
                for position, token in enumerate(sequences[index])
            ]
            try:
                context.clear()
                for start in range(0, len(entries), context.n_batch):
                    context.decode(entries[start : start + context.n_batch])
                vectors += [context.embedding(number) for number in range(len(chosen))]
            except Aborted:
                raise CancelledError("it was cancelled") from None
        return vectors

    def _context_for(self, pooling: str, n_batch: int) -> LlamaContext:
        """A context that takes so many tokens at once: llama.cpp aborts where more than n_ubatch see each other."""
        made_pooling, made_batch = self._made_for
        if self._context is not None and made_pooling == pooling and made_batch >= n_batch:
            return self._context
        if self._context is not None:
            self._context.close()
            self._context = None
        together = 1 if self._weights.is_recurrent or self._weights.rope_depends_on_window else BATCH_TEXTS
        load = replace(
            self._load,
            n_ctx=_rounded(self.n_ctx),
            n_ctx_start=n_batch,
            n_batch=n_batch,
            n_ubatch=n_batch,
            n_seq_max=together,
            n_cells=_rounded(self.n_ctx),
            n_parked=0,
            n_stream=0,
            exact=False,
            warm_up=False,
        )
        self._context = LlamaContext(self._weights, load, n_outputs=n_batch, pooling=pooling)
        self._made_for = pooling, n_batch
        return self._context


def _rounded(n_tokens: int) -> int:
    """Up to as many as llama.cpp reserves memory for: as many of each text."""
    return -(-n_tokens // BATCH_TEXTS) * BATCH_TEXTS

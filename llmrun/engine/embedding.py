"""Embeddings of token sequences: their batches, and a context of their own. Must not know texts.

The KV cache is emptied before every batch. One job is computed at a time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from llmrun.engine.llama.base import Aborted, Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.errors import CancelledError
from llmrun.gguf.pooling import is_encoder

if TYPE_CHECKING:
    from llmrun.engine.llama.model import LlamaModel
    from llmrun.engine.slices import TimeShare
    from llmrun.protocol.loading import Load

BATCH_TOKENS = 512  # Tokens of short texts in one batch: attention over more would cost more than it saves
BATCH_TEXTS = 64


def batches(lengths: Sequence[int], max_tokens: int, max_texts: int) -> Iterator[range]:
    """Yield the sequences of each batch, in their order; a sequence longer than max_tokens is alone."""
    start = tokens = 0
    for index, length in enumerate(lengths):
        if index > start and (tokens + length > max_tokens or index - start == max_texts):
            yield range(start, index)
            start, tokens = index, 0
        tokens += length
    if start < len(lengths):
        yield range(start, len(lengths))


class Embedder:
    """An embedding model over loaded weights; its context is created at the first use."""

    def __init__(self, weights: LlamaModel, load: Load) -> None:
        self._weights, self._load = weights, load
        self._context: LlamaContext | None = None
        self._pooling, self._n_batch, self._n_cells = "", 0, 0  # of the context

    @cached_property
    def _is_encoder(self) -> bool:
        return is_encoder(self._weights.header)

    @property
    def n_ctx(self) -> int:
        """Maximum length of a sequence. An encoder has vectors for no more positions than it was trained on."""
        return min(self._load.n_ctx, self._weights.n_ctx_train) if self._is_encoder else self._load.n_ctx

    def embed(
        self, sequences: Sequence[Sequence[int]], pooling: str, share: TimeShare
    ) -> Generator[None, None, list[bytes]]:
        """Return the vector of each sequence, as float32; its scores if the model has a ranking head.

        Yields after each slice.

        Args:
            sequences: token ids; none is empty or longer than n_ctx.
            pooling: as in EmbedTexts.

        Raises:
            CancelledError: the cancel flag was set.
            OutOfMemoryError: the longest sequence needs more memory.
            DecodeError: llama.cpp failed.
        """
        lengths = [len(tokens) for tokens in sequences]
        # A causal model's vector of the last token needs no wide batch: the sequence can be decoded in pieces.
        in_pieces = pooling == "last" and not self._is_encoder
        longest = _rounded(min(max(BATCH_TOKENS, *lengths), self.n_ctx))
        n_batch = min(longest, _rounded(BATCH_TOKENS)) if in_pieces else longest
        context = self._context_for(pooling, n_batch, longest)
        vectors: list[bytes] = []
        while len(vectors) < len(lengths):
            most = share.tokens(min(context.n_batch, BATCH_TOKENS))
            start = len(vectors)
            count = len(next(batches(lengths[start:], most, context.n_seq_max)))
            entries = [
                Entry(token, position, number, True)
                for number, tokens in enumerate(sequences[start : start + count])
                for position, token in enumerate(tokens)
            ]
            try:
                context.clear()
                begin = 0
                while begin < len(entries):
                    if begin:
                        yield
                    piece = entries[begin : begin + (share.tokens(context.n_batch) if in_pieces else context.n_batch)]
                    with share.measured(len(piece)):
                        context.decode(piece)
                        context.synchronize()
                    begin += len(piece)
                vectors += [context.embedding(number) for number in range(count)]
            except Aborted:
                raise CancelledError("it was cancelled") from None
            yield
        return vectors

    def close(self) -> None:
        """Free the context; the next use creates another one."""
        if self._context is not None:
            self._context.close()
            self._context = None

    def _context_for(self, pooling: str, n_batch: int, n_cells: int) -> LlamaContext:
        """Return a context with this batch size: llama.cpp aborts if more than n_ubatch tokens attend to each other.

        Args:
            n_cells: its cells, at least.
        """
        is_enough = self._n_batch >= n_batch and self._n_cells >= n_cells
        if self._context is not None and self._pooling == pooling and is_enough:
            return self._context
        self.close()
        n_seq_max = 1 if self._weights.is_recurrent or self._weights.rope_depends_on_window else BATCH_TEXTS
        load = replace(
            self._load,
            n_ctx=_rounded(self.n_ctx) if self._weights.rope_depends_on_window else n_cells,
            n_batch=n_batch,
            n_ubatch=n_batch,
            n_seq_max=n_seq_max,
            n_cells=n_cells,
            n_parked=0,
            warm_up=False,
        )
        self._context = LlamaContext(self._weights, load, n_outputs=n_batch, pooling=pooling)
        self._pooling, self._n_batch, self._n_cells = pooling, n_batch, n_cells
        return self._context


def _rounded(n_tokens: int) -> int:
    """Round up to a multiple of the number of texts, as llama.cpp does when it reserves memory."""
    return -(-n_tokens // BATCH_TEXTS) * BATCH_TEXTS

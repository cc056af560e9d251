"""What goes into llama_decode at once.

Owns the memory of a llama_batch; must not know what a context holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from llmrun.engine.llama.base import EmbeddedInput, Entry
from llmrun.engine.llama.library import function
from llmrun.engine.llama.positions import Positions

_DIMENSIONS = 4  # of the positions of a picture's tokens, at most


class LlamaBatch:
    """A llama_batch over arrays of our own, made once.

    Args:
        positions: of the tokens that go in, and of those before them.

    Attributes:
        n_tokens: how many are in it.
    """

    def __init__(self, llama: Any, size: int, positions: Positions) -> None:
        self._placed = positions
        self._tokens, self._sequences = ((ctypes.c_int32 * size)() for _ in range(2))
        self._positions = (ctypes.c_int32 * (_DIMENSIONS * size))()
        self._wanted = (ctypes.c_int8 * size)()
        self._counts = (ctypes.c_int32 * size)(*[1] * size)
        start, step = ctypes.addressof(self._sequences), ctypes.sizeof(ctypes.c_int32)
        self._ids = (ctypes.c_void_p * size)(*range(start, start + step * size, step))
        ids = ctypes.cast(self._ids, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
        arrays = {"pos": self._positions, "n_seq_id": self._counts, "seq_id": ids, "logits": self._wanted}
        self._of_tokens = llama.llama_batch(token=self._tokens, **arrays)
        self._of_vectors = llama.llama_batch(**arrays)
        self._native, self._causal = self._of_tokens, True
        self._decode = function("llama_decode", ctypes.c_int32, ctypes.c_void_p, llama.llama_batch)
        self._set_causal = llama.llama_set_causal_attn

    @property
    def n_tokens(self) -> int:
        """See above."""
        return int(self._native.n_tokens)

    def fill(self, batch: Sequence[Entry] | EmbeddedInput) -> int:
        """Put entries in, or part of a picture; how many of them want logits."""
        if not isinstance(batch, Sequence):
            return self._embed(batch)
        self._native, self._causal = self._of_tokens, True
        self._native.n_tokens = len(batch)
        tokens, positions, sequences, wanted = self._tokens, self._positions, self._sequences, self._wanted
        n_wanted = 0
        for index, (token, position, sequence_id, wants_logits) in enumerate(self._placed.of_entries(batch)):
            tokens[index], positions[index], sequences[index] = token, position, sequence_id
            wanted[index] = wants_logits
            n_wanted += wants_logits
        return n_wanted

    def _embed(self, part: EmbeddedInput) -> int:
        size = part.n_tokens
        self._of_vectors.embd = ctypes.cast(part.address(), ctypes.POINTER(ctypes.c_float))
        self._native, self._causal = self._of_vectors, part.causal
        self._native.n_tokens = size
        positions = self._placed.of_image(part)
        self._positions[: len(positions)] = [*positions]
        self._sequences[:size] = [part.sequence_id] * size
        self._wanted[:size] = [0] * size
        return 0

    def decode(self, context: Any) -> int:
        """What llama_decode returns."""
        if self._causal:
            return int(self._decode(context, self._native))
        self._set_causal(context, False)
        try:
            return int(self._decode(context, self._native))
        finally:
            self._set_causal(context, True)

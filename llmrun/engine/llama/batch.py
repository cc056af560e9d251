"""The input of one llama_decode call: the memory of a llama_batch, and the positions of its tokens.

With M-RoPE an image takes as many positions as its longer side has patches, fewer than tokens, and the following tokens
continue from there (Qwen2-VL, arXiv:2409.12191, section 2.1).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from llmrun import _native
from llmrun.engine.llama.base import EmbeddedInput, Entry, Inputs, MediaSpan, RunLimit, RunRow, RunSteps
from llmrun.engine.llama.followers import Follower
from llmrun.engine.llama.library import address, function

_DIMENSIONS = 4  # maximum dimensions of the positions of an image's tokens


class LlamaBatch:
    """A llama_batch over arrays of our own, allocated once."""

    def __init__(self, llama: Any, size: int, positions: Positions) -> None:
        self._media_positions = positions
        self._tokens, self._sequences = ((ctypes.c_int32 * size)() for _ in range(2))
        self._positions = (ctypes.c_int32 * (_DIMENSIONS * size))()
        self._outputs = (ctypes.c_int8 * size)()
        self._counts = (ctypes.c_int32 * size)(*[1] * size)
        start, step = ctypes.addressof(self._sequences), ctypes.sizeof(ctypes.c_int32)
        self._ids = (ctypes.c_void_p * size)(*range(start, start + step * size, step))
        ids = ctypes.cast(self._ids, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
        arrays = {"pos": self._positions, "n_seq_id": self._counts, "seq_id": ids, "logits": self._outputs}
        self._token_batch = llama.llama_batch(token=self._tokens, **arrays)
        self._vector_batch = llama.llama_batch(**arrays)
        self._native, self._causal = self._token_batch, True
        self._decode = function("llama_decode", ctypes.c_int32, ctypes.c_void_p, llama.llama_batch)
        self._set_causal = llama.llama_set_causal_attn

        self._decoder = _native.Decoder(*map(address, ("llama_decode", "llama_get_logits_ith", "llama_vocab_is_eog")))

    @property
    def n_tokens(self) -> int:
        return int(self._native.n_tokens)

    def fill(self, batch: Inputs) -> int:
        """Fill the batch with entries or with part of an image; return the number of entries with logits."""
        if not isinstance(batch, (list, Sequence)):  # a list is recognized without the caches of abc
            return self._fill_embedded(batch)
        self._native, self._causal = self._token_batch, True
        self._native.n_tokens = len(batch)
        tokens, positions, sequences, outputs = self._tokens, self._positions, self._sequences, self._outputs
        n_outputs = 0
        for index, (token, position, sequence_id, wants_logits) in enumerate(self._media_positions.of_entries(batch)):
            tokens[index], positions[index], sequences[index] = token, position, sequence_id
            outputs[index] = wants_logits
            n_outputs += wants_logits
        return n_outputs

    def _fill_embedded(self, part: EmbeddedInput) -> int:
        size = part.n_tokens
        self._vector_batch.embd = ctypes.cast(part.address(), ctypes.POINTER(ctypes.c_float))
        self._native, self._causal = self._vector_batch, part.causal
        self._native.n_tokens = size
        positions = self._media_positions.of_media(part)
        self._positions[: len(positions)] = [*positions]
        self._sequences[:size] = [part.sequence_id] * size
        self._outputs[:size] = [0] * size
        return 0

    def run(
        self, context: int, vocabulary: int, rows: Sequence[RunRow], limit: RunLimit, *, overlaps: bool
    ) -> tuple[int, int, list[int], RunSteps]:
        """Decode an entry of each sequence and the tokens sampled after it, see _native.Decoder.run().

        Args:
            overlaps: steps are taken while the next one is computed.
        """
        assert len(rows) <= len(self._outputs)
        self._native, self._causal = self._token_batch, True
        entries = self._media_positions.of_entries([row.entry for row in rows])
        inputs = [(entry, *row[1:]) for entry, row in zip(entries, rows, strict=True)]
        return self._decoder.run(context, vocabulary, ctypes.addressof(self._token_batch), inputs, *limit, overlaps)

    def decode(self, context: Any) -> int:
        """Call llama_decode; return its status."""
        if self._causal:
            return int(self._decode(context, self._native))
        self._set_causal(context, False)
        try:
            return int(self._decode(context, self._native))
        finally:
            self._set_causal(context, True)


class Positions(Follower):
    """The positions of one context's sequences; empty while every image takes as many positions as tokens."""

    def __init__(self) -> None:
        self._spans: dict[int, list[MediaSpan]] = {}

    def can_save(self, sequence_id: int) -> bool:
        """Return whether the position of each token of a sequence is its index."""
        return sequence_id not in self._spans

    def at(self, sequence_id: int, index: int) -> int | None:
        """Return a token's position; None inside an image, where a sequence can't be cut."""
        position = index
        for span in self._spans.get(sequence_id, ()):
            if span.start < index < span.end:
                return None
            if span.end <= index:
                position -= span.saved
        return position

    def n_tokens(self, sequence_id: int, n_positions: int) -> int:
        """Return the number of tokens in a sequence's first n_positions positions."""
        count = n_positions
        for span in self._spans.get(sequence_id, ()):
            if count > span.start:
                count += span.saved
        return count

    def of_entries(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Return the entries with positions instead of indexes."""
        if not self._spans:
            return entries
        return [entry._replace(position=self.at(entry.sequence_id, entry.position) or 0) for entry in entries]

    def of_media(self, part: EmbeddedInput) -> Sequence[int]:
        """Return the positions of an image's part, see EmbeddedInput.positions(); remember the image's span."""
        span, sequence_id = part.span, part.sequence_id
        first = self.at(sequence_id, span.start) or 0
        if span.saved and span not in self._spans.get(sequence_id, ()):
            self._spans.setdefault(sequence_id, []).append(span)
        return part.positions(first)

    def cut(self, sequence_id: int, start: int, position: int, n_dropped: int) -> None:
        remaining = [span for span in self._spans.pop(sequence_id, ()) if span.start < start]
        if remaining:
            self._spans[sequence_id] = remaining

    def copied(self, source: int, target: int) -> None:
        if source in self._spans:
            self._spans[target] = list(self._spans[source])

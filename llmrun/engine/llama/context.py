"""A model's context and its KV cache.

The only owner of a llama_context and of everything that is set on it; must not know chat, sampling or scheduling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from llmrun import _native
from llmrun.engine.llama.base import Aborted, DecodeError, Entry, NoRoom
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import BadModelError, OutOfMemoryError
from llmrun.protocol.messages import Load

_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}  # llama_flash_attn_type
KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
"""Types that llama.cpp's KV cache can have -> ggml's number."""
_NO_ROOM, _ABORTED = 1, 2  # what llama_decode gives


class LlamaContext:
    """base.Context over llama.cpp.

    The KV cache begins small and doubles when a sequence outgrows it, up to the context window that was asked for:
    a window of 128k tokens costs its gigabytes only when they are used, and no start waits for their zeroing.
    """

    def __init__(self, model: LlamaModel, load: Load) -> None:
        """Make the context.

        Raises:
            BadModelError: the model has no KV cache, so it can't generate text.
            OutOfMemoryError: the context does not fit.
        """
        self.model = model
        self._llama = model.llama
        self._load = load
        self.vocabulary = model.vocabulary
        self.n_ctx = load.n_ctx
        self.n_batch = load.n_batch
        self.n_seq_max = load.n_seq_max
        self.unified = load.n_seq_max > 1
        self.n_cells = load.n_ctx * load.n_seq_max
        self._room = min(load.n_ctx_start, load.n_ctx)
        self._context = self._make_context(self._room)
        self._memory = self._llama.llama_get_memory(self._context)
        if not self._memory:
            raise BadModelError("this model can't generate text", why="it is an encoder, made for embeddings")
        # Indexing a library makes a function object of our own, whose result is the bare address.
        self._get_logits = self._llama._lib["llama_get_logits_ith"]
        self._get_logits.argtypes, self._get_logits.restype = (ctypes.c_void_p, ctypes.c_int32), ctypes.c_void_p
        self._batch = self._llama.llama_batch_init(self.n_batch, 0, 1)
        for i in range(self.n_batch):
            self._batch.n_seq_id[i] = 1
        if load.warm_up:
            self._warm_up()

    def close(self) -> None:
        """Free the context and its KV cache; it can't be used any more."""
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)

    def _make_context(self, n_ctx: int) -> Any:
        llama, load = self._llama, self._load
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx * load.n_seq_max
        params.n_batch = load.n_batch
        params.n_ubatch = min(load.n_batch, load.n_ubatch)
        params.n_seq_max = load.n_seq_max
        params.kv_unified = self.unified
        params.n_threads = load.threads
        params.n_threads_batch = load.threads_batch or load.threads
        params.flash_attn_type = _FLASH_ATTENTION[load.flash_attention]
        params.type_k, params.type_v = KV_TYPES[load.kv_type_k], KV_TYPES[load.kv_type_v]
        params.abort_callback = llama.ggml_abort_callback(_native.abort_callback_address)
        params.abort_callback_data = self.model.flag.address
        context = llama.llama_init_from_model(self.model.pointer, params)
        if not context:
            raise OutOfMemoryError(
                f"there is no memory for a context window of {n_ctx:,} tokens",
                hint="ask for a smaller one with --ctx",
            )
        return context

    def _warm_up(self) -> None:
        """One decode of one token, so that pages and threads are there when the first prompt comes."""
        self.decode([Entry(max(self.vocabulary.bos, 0), 0, 0, False)])
        self.forget(0, 0)

    def decode(self, batch: Sequence[Entry]) -> None:
        """See base.Context."""
        native = self._batch
        native.n_tokens = len(batch)
        tokens, positions, sequences, logits = native.token, native.pos, native.seq_id, native.logits
        for i, (token, position, sequence_id, wants_logits) in enumerate(batch):
            tokens[i] = token
            positions[i] = position
            sequences[i][0] = sequence_id
            logits[i] = wants_logits
        needed = max(entry.position for entry in batch) + 1
        if needed > self._room:
            self._grow(needed)
        status = self._llama.llama_decode(self._context, native)
        if status == _ABORTED:
            raise Aborted
        if status == _NO_ROOM:
            raise NoRoom
        if status != 0:
            raise DecodeError(f"llama.cpp could not decode a batch of {len(batch)} tokens", why=f"status {status}")

    def _grow(self, needed: int) -> None:
        """Move every sequence into a context with room for more tokens."""
        llama = self._llama
        room = min(self.n_ctx, max(2 * self._room, needed))
        bigger = self._make_context(room)
        for sequence in range(self.n_seq_max):
            state = self.state(sequence)
            if llama.llama_state_seq_set_data(bigger, _bytes_of(state), len(state), sequence) != len(state):
                llama.llama_free(bigger)
                raise DecodeError("llama.cpp could not move the KV cache into a larger context")
        llama.llama_free(self._context)
        self._context, self._room = bigger, room
        self._memory = llama.llama_get_memory(bigger)

    def drop(self, sequence_id: int, start: int, end: int) -> bool:
        """See base.Context."""
        llama = self._llama
        if not llama.llama_memory_can_shift(self._memory):
            return False
        if not llama.llama_memory_seq_rm(self._memory, sequence_id, start, end):
            return False
        llama.llama_memory_seq_add(self._memory, sequence_id, end, -1, start - end)
        return True

    def copy(self, source: int, target: int, length: int) -> bool:
        """See base.Context."""
        if not self.unified:
            return False
        self._llama.llama_memory_seq_cp(self._memory, source, target, 0, length)
        return True

    def state(self, sequence_id: int) -> bytearray:
        """See base.Context."""
        llama = self._llama
        state = bytearray(llama.llama_state_seq_get_size(self._context, sequence_id))
        copied = llama.llama_state_seq_get_data(self._context, _bytes_of(state), len(state), sequence_id)
        del state[copied:]
        return state

    def set_state(self, sequence_id: int, state: bytes, n_tokens: int) -> bool:
        """See base.Context."""
        if n_tokens > self.n_ctx:
            return False
        if n_tokens > self._room:
            self._grow(n_tokens)
        self.forget(sequence_id, 0)
        pointer = ctypes.cast(ctypes.c_char_p(state), ctypes.POINTER(ctypes.c_uint8))
        if self._llama.llama_state_seq_set_data(self._context, pointer, len(state), sequence_id) == len(state):
            return True
        self.forget(sequence_id, 0)
        return False

    def logits(self, index: int) -> int:
        """See base.Context."""
        return self._get_logits(self._context, index) or 0

    def forget(self, sequence_id: int, start: int) -> bool:
        """See base.Context."""
        return bool(self._llama.llama_memory_seq_rm(self._memory, sequence_id, start, -1))


def _bytes_of(data: bytearray) -> Any:
    """A bytearray's memory for llama.cpp; nothing is copied."""
    return (ctypes.c_uint8 * len(data)).from_buffer(data)

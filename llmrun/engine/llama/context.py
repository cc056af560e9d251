"""A model's context and its KV cache.

The only owner of a llama_context and its settings; must not know chat, sampling or scheduling.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from pathlib import Path

from llmrun import _native
from llmrun.engine.llama.base import (
    ALLOCATING,
    Aborted,
    CacheFull,
    DecodeError,
    EmbeddedInput,
    Entry,
    Inputs,
    Run,
    RunLimit,
    RunRow,
    all_of,
)
from llmrun.engine.llama.batch import LlamaBatch, Positions
from llmrun.engine.llama.devices import gpus
from llmrun.engine.llama.followers import Follower, SavedHeads
from llmrun.engine.llama.heads import PredictionHeads
from llmrun.engine.llama.library import bytes_of, function
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.llama.parameters import (
    Watch,
    check_kv_types,
    context_parameters,
    guarded,
    has_own_attention,
    out_of_memory,
)
from llmrun.engine.llama.prefix_state import export_in_pieces, prefix_state, state_memory
from llmrun.engine.llama.rollback import Rollback
from llmrun.engine.llama.zeroing import can_note_reads, noting_cleared, zeroes_on_demand
from llmrun.errors import BadModelError
from llmrun.gguf.pooling import POOLINGS
from llmrun.protocol.adapters import AdapterScale, by_default
from llmrun.protocol.devices import NO_DEVICE, device_names
from llmrun.protocol.loading import Load
from llmrun.protocol.settings import MAX_THREADS

_NO_ROOM, _ABORTED = 1, 2  # status of llama_decode
_TO_THE_END = -1
_PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: without keys and values of full attention
# From 512 cells on, ggml's flash attention gives each thread a part of one token's cells, and adds the parts up in half
# precision; llama.cpp computes over multiples of 256 cells. Our own kernels add in one order.
_SPLIT_FROM = 256
_SPLIT_TYPES = {("f16", "f16"), ("f32", "f32")}
# A sequence's state: a magic number and its id, the number of streams, then for each stream its number of cells and the
# cells. In a file, other numbers come instead of the first two.
_MAGIC, _COUNT, _STATE_MAGIC = struct.Struct("=Ii"), struct.Struct("=I"), 0xAF143CD8  # io_magic in llama-context.cpp
# What a context exports has one stream, and zeros after it: the counts of the other streams where it is set.
_MOST_STREAMS = 256
_OTHER_STREAMS = bytes(_COUNT.size * (_MOST_STREAMS - 1))
_FILE_HEADER = 12  # bytes that llama.cpp writes before a state: magic, version, number of tokens
_OPERATIONS = 0.62  # of a graph's nodes, at most: the rest are views, in all architectures looked at
_MAX_VERIFIED = 16  # rows of logits of a step that verifies drafts


class LlamaContext:
    """base.Context over llama.cpp.

    The KV cache is allocated whole. On Linux, and in the machine's own memory, it takes memory on use, see zeroing.py:
    a window of 128k tokens takes its gigabytes only when they are used, and loading does not wait for their zeroing.

    If there are cells for a whole window of each sequence, each has a stream of its own, so that attention skips the
    cells of the others, which makes steps of several rows faster. If there are fewer, all sequences share one pool, in
    which each can have a whole window.
    """

    _most_threads = MAX_THREADS

    def __init__(
        self,
        model: LlamaModel,
        load: Load,
        *,
        n_outputs: int = 0,
        watch: Watch | None = None,
        on_processor: bool = False,
        pooling: str = "none",
        encodes: bool = False,
    ) -> None:
        """Create the context.

        Args:
            n_outputs: maximum rows of logits of a batch, each of which takes memory; 0 is one per sequence.
            watch: evaluation callback.
            on_processor: compute nothing on a GPU, so that tensors stay in the memory of the weights.
            pooling: one of POOLINGS; unless "none", sequences have an embedding(), and all entries need outputs.
            encodes: accept a model that can't generate text.

        Raises:
            BadModelError: the model can't generate text (without `encodes`), or llama.cpp refuses an adapter.
            OutOfMemoryError: the context does not fit.
        """
        self.model, self.vocabulary = model, model.vocabulary
        self._llama, self._load, self._on_processor = model.llama, load, on_processor
        self._pooling, self._needs_memory = POOLINGS.index(pooling), not (watch or encodes or pooling != "none")
        self._adapters = by_default(load.adapters)
        for adapter in load.adapters:
            model.adapter(adapter)
        self._n_ubatch = min(load.n_ubatch, load.n_batch)
        self._set_sizes(n_outputs, is_watched=watch is not None)
        self.heads: PredictionHeads | None = None
        self._failures: list[BaseException] = []  # raised by the evaluation callback
        self._callback = guarded(self._llama, watch, self._failures.append) if watch else None
        self._shifted: set[int] = set()  # sequences whose keys the next decode rotates to their new positions
        self._copying: set[int] = set()  # sequences whose stream the next decode copies from another one
        self._create_in_layout()
        self._positions = Positions()
        self._followers: list[Follower] = [self._positions, *([self._rollback] if self._rollback is not None else [])]
        self._batch = LlamaBatch(self._llama, self.n_batch, self._positions)
        self._n_operations = _OPERATIONS * _native.graph_nodes()  # of a micro-batch
        self._began_at: int | None = None  # operations before the running decode()
        self._encoding: EmbeddedInput | None = None  # an image or audio that the running decode() has to encode first
        self._get_logits = function("llama_get_logits_ith", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
        if load.warm_up:
            self.decode([Entry(max(self.vocabulary.bos, 0), 0, 0, False)])  # maps pages and starts threads
            self.forget(0, 0)

    def _set_sizes(self, n_outputs: int, *, is_watched: bool) -> None:
        """Choose the numbers of cells, sequences and rows, and what can be copied, cut and rolled back."""
        model, load = self.model, self._load
        self.n_ctx, self.n_seq_max = load.n_ctx, load.n_seq_max
        self.on_device = not self._on_processor and _is_on_device(load)
        self.n_cells = min(load.n_cells or load.n_ctx * load.n_seq_max, load.n_ctx * load.n_seq_max)
        is_plain = not model.sliding_window and not model.is_recurrent  # no others are converted
        self._set_layout(has_streams=is_plain and self.n_cells == load.n_ctx * load.n_seq_max)
        # A batch longer than the cache would make llama.cpp abort.
        self.n_batch = min(load.n_batch, self.n_cells if self.can_copy else load.n_ctx)
        # A recurrent state takes its memory even if unused, and can't be shared in part.
        self.n_parked = load.n_parked if self._is_pool and not model.is_recurrent else 0
        self.cuts, self.has_checkpoints = not model.is_recurrent, model.is_recurrent or model.sliding_window > 0
        # Of a recurrent model with a sliding window, llama.cpp does not say which cells of the window it still has.
        n_rollback = 0 if is_watched or model.sliding_window else load.n_rollback
        self._rollback = Rollback(n_rollback, self._n_ubatch) if model.is_recurrent else None
        verified = _MAX_VERIFIED if self.cuts or n_rollback else 0
        self.n_outputs = max(n_outputs, verified, self.n_seq_max + self.n_parked)  # llama.cpp requires one per sequence

    def _create_in_layout(self) -> None:
        """Create the context; without streams if its cache is not the plain one whose states are converted."""
        self._create()
        empty = _MAGIC.size + _COUNT.size * (1 + self.n_seq_max)
        if self._is_streamed and self._llama.llama_state_seq_get_size(self._pointer, 0) != empty:
            self.close()
            self._set_layout(has_streams=False)
            self._create()

    def limit_threads(self, most: int) -> None:
        if most != self._most_threads:
            self._most_threads = most
            self._llama.llama_set_n_threads(self._pointer, *self.n_threads)
            if self.heads is not None:
                self.heads.set_threads(*self.n_threads)

    @property
    def n_threads(self) -> tuple[int, int]:
        """The threads that compute a batch of one token, and of more."""
        load, most = self._load, self._most_threads
        return min(most, load.threads), min(most, load.threads_batch or load.threads)

    def close(self) -> None:
        if self.heads is not None:
            self.heads.close()
        self._llama.llama_free(self._pointer)

    def open_heads(self, model: LlamaModel | None = None) -> PredictionHeads:
        """Create a context for prediction heads, which follows this one; raises as PredictionHeads.

        Args:
            model: of a file with nothing but heads; None for the model's own.
        """
        n_cells = self.n_cells if self._is_pool else self.n_ctx * self.n_seq_max
        n_sequences = self.n_seq_max + self.n_parked
        self.heads = PredictionHeads(model or self.model, self._load, self._pointer, n_sequences, n_cells)
        self._followers.append(self.heads)
        if self._adapters:
            self._set_adapters()
        return self.heads

    def switch_heads(self, *, on: bool) -> None:
        """Have the heads follow this context from now on, or not."""
        if self.heads is not None:
            self.heads.switch(on=on)

    def can_use_heads(self, sequence_id: int) -> bool:
        """Return whether the heads can draft after a sequence, i.e. know the hidden state of its last token."""
        return self.heads is not None and self.heads.is_ready(sequence_id, self._n_positions(sequence_id))

    @property
    def split_from(self) -> int | None:
        load = self._load
        splits = load.flash_attention != "off" and (load.kv_type_k, load.kv_type_v) in _SPLIT_TYPES
        return _SPLIT_FROM if splits and not self.on_device and not self._has_own_attention else None

    @cached_property
    def _has_own_attention(self) -> bool:
        return has_own_attention(self.model, self._load)

    @property
    def max_draft(self) -> int:
        return self._rollback.most if self._rollback is not None else self.n_outputs - 1

    # ---- creation ----

    def _set_layout(self, *, has_streams: bool) -> None:
        """Decide whether sequences share one pool, or have streams and copy prefixes, or share nothing."""
        # llama.cpp takes a pool for one window, and would choose the factors of LongRoPE by its size.
        can_share = self.n_seq_max > 1
        self._is_pool = can_share and not has_streams and not self.model.rope_depends_on_window
        self.can_copy = self._is_pool or (can_share and has_streams)
        self.shares_cells, self.splits_batches = self._is_pool, not self._is_pool

    @property
    def _is_streamed(self) -> bool:
        """Each sequence has a stream, and prefixes are copied."""
        return self.can_copy and not self._is_pool

    def _create(self) -> None:
        """Create the llama_context.

        Raises:
            OutOfMemoryError: the context does not fit.
            UsageError: a KV type does not suit the model.
        """
        llama, load = self._llama, self._load
        check_kv_types(self.model, load)
        params = context_parameters(llama, load)
        room = self.n_cells if self._is_pool else load.n_ctx
        params.n_ctx = room if self._is_pool else room * load.n_seq_max
        params.n_seq_max = load.n_seq_max + self.n_parked
        params.n_outputs_max = self.n_outputs
        params.kv_unified = self._is_pool
        if self._rollback is not None:  # llama.cpp aborts if they don't fit into a micro-batch beside one more token
            params.n_rs_seq = min(self._rollback.most, max(params.n_ubatch - 2, 0))
        if self._pooling:
            params.embeddings, params.pooling_type = True, self._pooling
        if self._on_processor:
            params.op_offload = params.offload_kqv = False
        if self._callback is not None:
            params.cb_eval = self._callback
        params.abort_callback = llama.ggml_abort_callback(_native.abort_callback_address)
        params.abort_callback_data = self.model.flag.address
        self.model.buffer_log.begin_context(llama, verbose=load.verbose)
        if not self.on_device:
            zeroes_on_demand()
        with ALLOCATING, noting_cleared() as cleared:
            context = llama.llama_init_from_model(self.model.pointer, params)
        if not context:
            raise out_of_memory(load, room, self.model.buffer_log.failed)
        memory = llama.llama_get_memory(context)
        if not memory and self._needs_memory:
            llama.llama_free(context)
            raise BadModelError("this model can't generate text", why="it is an encoder, made for embeddings")
        self._pointer, self._memory = context, memory
        llama.llama_set_n_threads(context, *self.n_threads)
        self._kv_buffers = [*filter(can_note_reads, cleared)]  # a stream's first cells can be copied without the others
        if self._rollback is not None:
            self._rollback.most = int(llama.llama_n_rs_seq(context))  # 0 for architectures without snapshots
        if self._adapters:
            self._set_adapters()

    # ---- computation ----

    def adapt(self, adapters: tuple[AdapterScale, ...]) -> None:
        if adapters != self._adapters:
            self._adapters = adapters
            self._set_adapters()

    def _set_adapters(self) -> None:
        llama, count = self._llama, len(self._adapters)
        found = [self.model.adapter(self._load.adapters[number]) for number, _ in self._adapters]
        pointers = (llama.llama_adapter_lora_p_ctypes * count)(*found)
        scales = (ctypes.c_float * count)(*(scale for _, scale in self._adapters))
        if llama.llama_set_adapters_lora(self._pointer, pointers, count, scales):
            raise DecodeError("llama.cpp could not set the adapters")
        if self.heads is not None and self.heads.model is self.model:
            self.heads.adapt(pointers, count, scales)

    def decode(self, batch: Inputs) -> None:
        self._encoding = batch if not isinstance(batch, (list, Sequence)) and batch.encoded < 1 else None
        if self._batch.fill(batch) > self.n_outputs:
            raise DecodeError(f"at most {self.n_outputs} entries of a batch can have logits")
        self._began_at = began_at = self.model.flag.n_computed
        status = self._batch.decode(self._pointer)
        self._began_at = self._encoding = None
        if not status and self._batch.n_tokens <= self._n_ubatch and not self._is_split(batch):
            self._n_operations = self.model.flag.n_computed - began_at
        self._forget_pending()
        if status == _NO_ROOM:
            raise CacheFull
        failure = self._failure_of(status)
        if isinstance(batch, (list, Sequence)):
            self._note_decoded(self._positions.of_entries(batch), failure, is_batch=True)
        else:
            self._note_decoded([Entry(0, 0, batch.sequence_id, False)], failure, is_batch=False)
        if self._callback is not None:
            self._raise_failure()
        if failure is not None:
            raise failure

    def _is_split(self, batch: Inputs) -> bool:
        """Return whether llama.cpp may compute a batch that is no larger than a micro-batch in several passes."""
        if not (self.splits_batches and isinstance(batch, (list, Sequence))):
            return False
        return batch[0].sequence_id != batch[-1].sequence_id

    @property
    def computed(self) -> float:
        began_at, n_operations, n_tokens = self._began_at, self._n_operations, self._batch.n_tokens
        encoding = self._encoding
        if began_at is None or not n_operations:
            return 0.0 if encoding is None else encoding.encoded / 2  # the other half decodes the vectors
        n_done = (self.model.flag.n_computed - began_at) / n_operations * min(n_tokens, self._n_ubatch)
        share = min(n_done, n_tokens - 1) / n_tokens
        return share if encoding is None else (1 + share) / 2

    def _forget_pending(self) -> None:
        """Forget changes of the KV cache that llama.cpp left to the decode call that has been."""
        self._shifted.clear()
        self._copying.clear()

    def _note_decoded(self, entries: Sequence[Entry], failure: Exception | None, *, is_batch: bool) -> None:
        """Tell the followers of a decode call; if it failed, rows that were not of one batch were perhaps decoded."""
        for follower in self._followers:
            if failure is None or not is_batch:
                follower.decoded(entries, is_batch=is_batch)
            if failure is not None:
                follower.lost(entry.sequence_id for entry in entries)

    def _failure_of(self, status: int) -> Aborted | DecodeError | None:
        if status == _ABORTED:
            return Aborted()
        message = f"llama.cpp could not decode a batch of {self._batch.n_tokens} tokens"
        return DecodeError(message, why=f"status {status}") if status else None

    def run(self, rows: Sequence[RunRow], limit: RunLimit) -> Run:
        status, n_steps, failed, steps = self._batch.run(
            self._pointer, self.vocabulary.pointer, rows, limit, overlaps=self.on_device
        )
        self._forget_pending()
        if status == _NO_ROOM and not n_steps:
            raise CacheFull
        failure = None if status == _NO_ROOM else self._failure_of(status)  # the next run raises CacheFull
        self._note_decoded([row.entry for row in rows], failure, is_batch=False)
        return Run(steps, failed, failure)

    def _raise_failure(self) -> None:
        self.synchronize()
        if self._failures:
            raise self._failures.pop()

    @property
    def predicts(self) -> bool:
        """The model generates text; encoders don't."""
        return bool(self._memory)

    def logits(self, index: int) -> int:
        """Return the address as base.Context.logits(); negative indexes count from the last row of logits."""
        return self._get_logits(self._pointer, index) or 0

    def embedding(self, sequence_id: int) -> bytes:
        """Return the embedding of a sequence of the last batch, or its scores if the pooling is "rank": float32."""
        llama, model = self._llama, self.model.pointer
        ranks = self._pooling == POOLINGS.index("rank")
        width = int(llama.llama_model_n_cls_out(model) if ranks else llama.llama_model_n_embd_out(model))
        found = llama.llama_get_embeddings_seq(self._pointer, sequence_id)
        if not found:
            raise DecodeError("llama.cpp gives this model no embeddings")
        return ctypes.string_at(found, width * ctypes.sizeof(ctypes.c_float))

    def synchronize(self) -> None:
        self._llama.llama_synchronize(self._pointer)

    # ---- content of the cache ----

    def clear(self) -> None:
        """Empty the KV cache."""
        if self._memory:
            self._llama.llama_memory_clear(self._memory, False)
        self._forget_pending()
        for sequence_id in range(self.n_seq_max + self.n_parked):
            self._note_cut(sequence_id, 0, 0, 0)

    def _note_cut(self, sequence_id: int, start: int, position: int, n_dropped: int) -> None:
        for follower in self._followers:
            follower.cut(sequence_id, start, position, n_dropped)

    def can_forget(self, sequence_id: int, start: int) -> bool:
        position = self._positions.at(sequence_id, start)
        if position is None or start == 0:
            return start == 0
        n_dropped = self._n_positions(sequence_id) - position
        if not all(follower.can_cut(sequence_id, n_dropped) for follower in self._followers):
            return False
        window = self.model.sliding_window  # all of it has to be cached
        return n_dropped <= 0 or not window or self._first(sequence_id) <= max(0, position - window + 1)

    def forget(self, sequence_id: int, start: int) -> bool:
        position = self._positions.at(sequence_id, start)
        if position is None or not self.can_forget(sequence_id, start):
            return False
        n_dropped = self._n_positions(sequence_id) - position
        is_removed = bool(self._llama.llama_memory_seq_rm(self._memory, sequence_id, position, _TO_THE_END))
        if is_removed:
            self._note_cut(sequence_id, start, position, n_dropped)
        return is_removed

    def _n_positions(self, sequence_id: int) -> int:
        return int(self._llama.llama_memory_seq_pos_max(self._memory, sequence_id)) + 1

    def _first(self, sequence_id: int) -> int:
        """Return the first position of a sequence from which on all cells are cached, negative if it has none."""
        return int(self._llama.llama_memory_seq_pos_min(self._memory, sequence_id))

    def drop(self, sequence_id: int, start: int, end: int) -> bool:
        llama, memory = self._llama, self._memory
        if not self.cuts or not llama.llama_memory_can_shift(memory):
            return False  # llama.cpp would move a recurrent state's position, and leave the state as it is
        if self.model.sliding_window and self._first(sequence_id) > 0:
            return False  # cells missing before the window would be inside it again
        if not llama.llama_memory_seq_rm(memory, sequence_id, start, end):
            return False
        llama.llama_memory_seq_add(memory, sequence_id, end, _TO_THE_END, start - end)
        self._shifted.add(sequence_id)
        self._note_cut(sequence_id, start, start, end - start)
        return True

    def copy(self, source: int, target: int, length: int, checkpoint: bytearray | memoryview | None = None) -> bool:
        if not self.can_copy or source in self._shifted:
            return False
        by_llama_cpp = self._is_pool or self.on_device
        if self._copy_all(source, target) if by_llama_cpp else self._copy_stream(source, target, length):
            for follower in self._followers:
                follower.copied(source, target)
            if self.forget(target, length) or (checkpoint is not None and self.go_back(target, checkpoint, length)):
                return True
        self.forget(target, 0)
        return False

    def _copy_all(self, source: int, target: int) -> bool:
        """Have llama.cpp let two sequences share their cells, or copy a stream with the next decode."""
        # llama.cpp would give the target the state without the rollback.
        is_pending = self._rollback is not None and self._rollback.is_pending(source)
        state = self._checkpoint(source) if is_pending else None
        if state is not None and not state:
            return False
        self._llama.llama_memory_seq_cp(self._memory, source, target, 0, _TO_THE_END)
        if not self._is_pool:
            self._copying.add(target)
        return state is None or self._put_checkpoint(target, state)

    def n_copied(self, source: int, length: int) -> int:
        if self._is_pool or self.on_device or not self.can_copy:
            return 0
        return length if self._kv_buffers else self._length(source)

    def _copy_stream(self, source: int, target: int, length: int) -> bool:
        """Copy a sequence's first cells within the machine's memory; llama.cpp would copy its whole stream."""
        export, n_bytes = self._exporter(source)
        state = prefix_state(export, n_bytes, source, length, self._kv_buffers) if self._kv_buffers else None
        if state is None:
            state = bytes_of(bytearray(n_bytes))
            export(ctypes.addressof(state))
        return bool(self._llama.llama_state_seq_set_data(self._pointer, state, len(state), target) == len(state))

    def checkpoint(self, sequence_id: int) -> bytearray:
        state = self._checkpoint(sequence_id)
        for part in self._saved(sequence_id, is_whole=False) if state else ():
            state += part
        return state

    def _saved(self, sequence_id: int, *, is_whole: bool) -> list[bytes | bytearray | memoryview]:
        return [part for follower in self._followers for part in follower.saved(sequence_id, is_whole=is_whole)]

    def _can_save(self, sequence_id: int) -> bool:
        """Return whether a state includes all: it lacks pending shifts and copies, and the positions of images."""
        is_pending = sequence_id in self._shifted or sequence_id in self._copying
        return not is_pending and all(follower.can_save(sequence_id) for follower in self._followers)

    def _checkpoint(self, sequence_id: int) -> bytearray:
        if not self._can_save(sequence_id):
            return bytearray()
        llama, where = self._llama, (sequence_id, _PARTIAL)
        state = bytearray(llama.llama_state_seq_get_size_ext(self._pointer, *where))
        del state[llama.llama_state_seq_get_data_ext(self._pointer, bytes_of(state), len(state), *where) :]
        return state

    def go_back(self, sequence_id: int, checkpoint: bytearray | memoryview, length: int) -> bool:
        state, saved = SavedHeads.split(checkpoint)
        if not self._put_checkpoint(sequence_id, state):
            return False
        for follower in self._followers:
            follower.restored(sequence_id, saved, is_whole=False)
        return self.forget(sequence_id, length)

    def _put_checkpoint(self, sequence_id: int, checkpoint: bytearray | memoryview) -> bool:
        source = bytes_of(checkpoint), len(checkpoint), sequence_id, _PARTIAL
        return bool(self._llama.llama_state_seq_set_data_ext(self._pointer, *source) == len(checkpoint))

    def state(self, sequence_id: int) -> bytearray:
        """Return the state without the cells that a sliding window has passed; empty if it can't be saved."""
        return bytearray(all_of(self.state_in_pieces(sequence_id, sys.maxsize)))

    def state_bytes(self, sequence_id: int) -> int:
        """Return the size of a state, at most: the zeros after it are few."""
        n_bytes = int(self._llama.llama_state_seq_get_size(self._pointer, sequence_id)) + len(_OTHER_STREAMS)
        return n_bytes + sum(follower.saved_bytes(sequence_id) for follower in self._followers)

    def state_in_pieces(self, sequence_id: int, piece_bytes: int) -> Generator[None, None, memoryview]:
        if not self._can_save(sequence_id):
            return memoryview(b"")
        export, n_bytes = self._exporter(sequence_id)
        end = b"".join((_OTHER_STREAMS, *self._saved(sequence_id, is_whole=True)))
        state = state_memory(n_bytes + len(end))
        # Without flash attention, each value is read by itself.
        has_rows = n_bytes > piece_bytes and self._load.flash_attention != "off"
        n_written = yield from export_in_pieces(export, state, self._kv_buffers if has_rows else (), piece_bytes)
        if n_written != n_bytes:
            return memoryview(b"")
        state[n_bytes:] = end
        if self._is_streamed:  # convert to the only stream: remove the counts of the streams before it, which are 0
            magic = bytes(state[: _MAGIC.size])
            state = state[_COUNT.size * sequence_id :]
            state[: _MAGIC.size + _COUNT.size] = magic + _COUNT.pack(1)
        return state

    def _exporter(self, sequence_id: int) -> tuple[Callable[[int], int], int]:
        """Return what writes a sequence's state to an address and returns its size, and that size."""
        n_bytes = int(self._llama.llama_state_seq_get_size(self._pointer, sequence_id))

        def export(address: int) -> int:
            target = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
            return int(self._llama.llama_state_seq_get_data(self._pointer, target, n_bytes, sequence_id))

        return export, n_bytes

    def write_state(self, sequence_id: int, path: Path) -> int | None:
        if not self._can_save(sequence_id):
            return None
        n_bytes = self._llama.llama_state_seq_save_file(self._pointer, os.fsencode(path), sequence_id, None, 0)
        if not n_bytes or n_bytes != path.stat().st_size:  # llama.cpp does not say why, nor that closing it failed
            raise OSError(f"llama.cpp could not write {path}: the disk may be full")
        start = _FILE_HEADER - _MAGIC.size + (_COUNT.size * sequence_id if self._is_streamed else 0)
        with path.open("r+b") as file:
            file.seek(start)
            file.write(_MAGIC.pack(_STATE_MAGIC, sequence_id))
            if self._is_streamed:  # convert as state_in_pieces() does
                file.write(_COUNT.pack(1))
            file.seek(0, os.SEEK_END)
            file.write(_OTHER_STREAMS)
            file.writelines(self._saved(sequence_id, is_whole=True))
        return start

    def set_state(self, sequence_id: int, state: bytearray | memoryview, n_tokens: int) -> bool:
        """Replace a sequence's state; never raises, because a failure is only a cache miss."""
        if n_tokens > self.n_ctx or sequence_id in self._copying:
            return False
        self.forget(sequence_id, 0)
        target, saved = SavedHeads.split(state)
        if not self._put_state(sequence_id, target):
            self.forget(sequence_id, 0)
            return False
        for follower in self._followers:
            follower.restored(sequence_id, saved, is_whole=True)
        return True

    def _put_state(self, sequence_id: int, state: memoryview) -> bool:
        if len(state) < _MAGIC.size + _COUNT.size + len(_OTHER_STREAMS):
            return False
        if self._is_streamed:
            _COUNT.pack_into(state, _MAGIC.size, self.n_seq_max)
        n_read = self._llama.llama_state_seq_set_data(self._pointer, bytes_of(state), len(state), sequence_id)
        if self._is_streamed:
            _COUNT.pack_into(state, _MAGIC.size, 1)
        # What is left is some of the zeros.
        return bool(n_read) and len(state) - n_read <= 2 * len(_OTHER_STREAMS) and not any(state[n_read:])

    def _length(self, sequence_id: int) -> int:
        last = int(self._llama.llama_memory_seq_pos_max(self._memory, sequence_id))
        return self._positions.n_tokens(sequence_id, last + 1)


def _is_on_device(load: Load) -> bool:
    """Return whether layers, and with them their KV cache, are computed by a GPU or another machine."""
    has_gpus = load.gpu_layers and device_names(load.device) != (NO_DEVICE,) and gpus()
    return bool(load.workers or has_gpus)

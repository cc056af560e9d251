"""The layers of a model that predict further tokens (multi-token prediction, NextN), in a context of their own.

For each position, that context holds the pair of the token there and the target model's hidden state of the token
before; so a hidden state is kept until the next token is known. Everything that changes the target's cache is mirrored
here. What can't be mirrored is forgotten, and costs some drafts: an answer never depends on them.

Owns that llama_context and what it holds; must not know which drafts are accepted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun import _native
from llmrun.engine.llama.base import Aborted, CacheFull, DecodeError, Entry
from llmrun.engine.llama.followers import UNKNOWN, Follower, SavedHeads
from llmrun.engine.llama.library import bytes_of, nextn_functions
from llmrun.engine.llama.parameters import context_parameters
from llmrun.errors import OutOfMemoryError
from llmrun.protocol.loading import Load

if TYPE_CHECKING:
    from llmrun.engine.llama.model import LlamaModel

_TO_THE_END = -1
_NO_ROOM, _ABORTED = 1, 2  # status of llama_decode
_KEPT_ROWS = 16  # the last rows of a sequence that wait: a step with drafts may be cut within them
_MAX_WAITING = 48


class _Row(NamedTuple):
    """A pair that is not in the heads' cache yet."""

    token: int
    position: int
    before: bytes  # hidden state of the position before; empty if it is unknown


@dataclass(slots=True)
class _Cells:
    """The cells of a sequence.

    The heads' cache holds the positions from start to length - 1, then come the waiting rows. After a draft, it also
    holds the pair of the newest token, which the target has not decoded.
    """

    start: int = 0
    length: int = 0
    n_positions: int = UNKNOWN  # that the target has decoded; unknown after a gap
    newest: int = -1  # token of the last cell, if the target has not decoded it
    before: bytes = b""  # hidden state of the target's last position
    waiting: list[_Row] = field(default_factory=list)


class PredictionHeads(Follower):
    """The context of a model's heads, beside the target's.

    Attributes:
        is_on: hidden states are recorded; off, everything is forgotten and costs nothing.
        n_most: drafted tokens in a row; 1 if each head predicts another distance, of which only the first is used.
        n_outputs: maximum rows with logits in a batch.
    """

    def __init__(self, model: LlamaModel, load: Load, target: Any, n_sequences: int, n_cells: int) -> None:
        """Create the context.

        Args:
            target: the llama_context to follow.
            n_sequences, n_cells: of the target's context.

        Raises:
            OutOfMemoryError: there is no memory for it.
            DecodeError: this build of llama.cpp, or the model, has no heads.
        """
        functions, n_heads = nextn_functions(), int(model.llama.llama_model_n_layer_nextn(model.pointer))
        if not n_heads or not model.draft_heads:
            raise DecodeError("the model was loaded without prediction heads")
        if functions is None:
            raise DecodeError("this build of llama.cpp exports no functions for prediction heads")
        self._functions, self._llama, self.model, self._target = functions, model.llama, model, target
        self.vocabulary = model.vocabulary
        llama = self._llama
        params = context_parameters(llama, load)
        params.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP
        params.n_ctx, params.n_seq_max, params.kv_unified = n_cells, n_sequences, True
        self.n_batch, self.n_ctx = min(load.n_batch, n_cells), load.n_ctx
        self.n_outputs = min(max(_KEPT_ROWS, 2 * n_sequences), self.n_batch)
        params.n_outputs_max = max(self.n_outputs, n_sequences)
        params.abort_callback = llama.ggml_abort_callback(_native.abort_callback_address)
        params.abort_callback_data = model.flag.address
        self._pointer = llama.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise OutOfMemoryError("there is no memory for the prediction heads")
        self._memory = llama.llama_get_memory(self._pointer)
        # Rows with logits: of a batch without mixed rows, that is right for each architecture.
        functions.set_embeddings(self._pointer, True, True)
        self._width = int(llama.llama_model_n_embd_out(model.pointer))
        self._row_bytes = self._width * ctypes.sizeof(ctypes.c_float)
        self._batch = _PairBatch(llama, self.n_batch, self._row_bytes)
        self._cells = {sequence_id: _Cells() for sequence_id in range(n_sequences)}
        self._own: dict[int, bytes] = {}  # sequence -> the head's hidden state after its last draft
        self._drafted: dict[int, int] = {}  # sequence -> drafted cells
        self.n_most = 1 if n_heads > 1 else _KEPT_ROWS - 1
        self.is_on = False

    def set_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Set the threads that compute a batch of one token, and of more."""
        self._llama.llama_set_n_threads(self._pointer, n_threads, n_threads_batch)

    def close(self) -> None:
        self._llama.llama_free(self._pointer)

    def switch(self, *, on: bool) -> None:
        """Have the target give hidden states of all rows, or none."""
        if on != self.is_on:
            self._functions.set_embeddings(self._target, on, False)
            self.is_on = on
            self._lose(self._cells)

    def adapt(self, pointers: Any, count: int, scales: Any) -> None:
        """Set the adapters of the target."""
        self._llama.llama_set_adapters_lora(self._pointer, pointers, count, scales)

    # ---- following the target ----

    def decoded(self, entries: Sequence[Entry], *, is_batch: bool) -> None:
        """Take the hidden states of a batch."""
        if not self.is_on:
            return
        states: Any = self._functions.get_embeddings(self._target) if is_batch else None
        address = ctypes.cast(states, ctypes.c_void_p).value
        if not address:
            self._lose(entry.sequence_id for entry in entries)
            return
        for index, (token, position, sequence_id, _) in enumerate(entries):
            cells = self._cells[sequence_id]
            if position != cells.n_positions:
                self._restart(sequence_id, position)
            if position < cells.length and token != cells.newest:
                self._remove(sequence_id, position)
            if position >= cells.length:
                cells.waiting.append(_Row(token, position, cells.before))
            cells.newest, cells.n_positions = -1, position + 1
            cells.before = ctypes.string_at(address + index * self._row_bytes, self._row_bytes)
        long = [each for each in {entry.sequence_id for entry in entries} if self._n_waiting(each) > _MAX_WAITING]
        self._feed(long, kept=_KEPT_ROWS)

    def _lose(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences: the target has decoded tokens whose hidden states are unknown."""
        for sequence_id in sequence_ids:
            cells = self._cells[sequence_id]
            if cells.length or cells.waiting:
                self._remove(sequence_id, 0)
            self._cells[sequence_id] = _Cells()

    def cut(self, sequence_id: int, start: int, position: int, n_dropped: int) -> None:
        self._cut(sequence_id, position)

    def _cut(self, sequence_id: int, position: int) -> None:
        """Cut a sequence to the positions before this one."""
        cells = self._cells[sequence_id]
        if cells.n_positions == UNKNOWN:
            return
        if position <= cells.start:
            self._lose([sequence_id])
            if position == 0:
                self._cells[sequence_id].n_positions = 0  # it begins anew, without a gap
            return
        if position < cells.n_positions:
            cells.before = next((row.before for row in cells.waiting if row.position == position), b"")
            cells.n_positions = position
        cells.waiting = [row for row in cells.waiting if row.position < position]
        if cells.length > position:
            self._remove(sequence_id, position)

    def copied(self, source: int, target: int) -> None:
        self._lose([target])
        found = self._cells[source]
        if found.n_positions == UNKNOWN:
            return
        if found.length > found.start:
            self._llama.llama_memory_seq_cp(self._memory, source, target, found.start, _TO_THE_END)
        newest = found.newest
        self._cells[target] = _Cells(
            found.start, found.length, found.n_positions, newest, found.before, list(found.waiting)
        )

    def saved_bytes(self, sequence_id: int) -> int:
        return int(self._llama.llama_state_seq_get_size(self._pointer, sequence_id))

    def saved(self, sequence_id: int, *, is_whole: bool) -> Sequence[bytes | bytearray | memoryview]:
        return self._saved(sequence_id, is_whole=is_whole).parts

    def _saved(self, sequence_id: int, *, is_whole: bool) -> SavedHeads:
        cells = self._cells[sequence_id]
        if cells.n_positions == UNKNOWN:
            return SavedHeads()
        state = bytearray()
        if is_whole:
            self._feed([sequence_id])
            self._remove(sequence_id, cells.n_positions)
            llama = self._llama
            state = bytearray(llama.llama_state_seq_get_size(self._pointer, sequence_id))
            del state[llama.llama_state_seq_get_data(self._pointer, bytes_of(state), len(state), sequence_id) :]
            if self._cells[sequence_id].n_positions == UNKNOWN:
                return SavedHeads()
        return SavedHeads(state, cells.before, cells.start, cells.n_positions)

    def restored(self, sequence_id: int, saved: SavedHeads, *, is_whole: bool) -> None:
        self._restore(sequence_id, saved) if is_whole else self._go_back(sequence_id, saved)

    def _restore(self, sequence_id: int, saved: SavedHeads) -> None:
        """Replace a sequence by what was saved with the target's state."""
        self._lose([sequence_id])
        if not self.is_on or saved.n_positions == UNKNOWN or len(saved.before) not in (0, self._row_bytes):
            return
        data = saved.state
        n_read = self._llama.llama_state_seq_set_data(self._pointer, bytes_of(data), len(data), sequence_id)
        last = int(self._llama.llama_memory_seq_pos_max(self._memory, sequence_id))
        if n_read == len(data) and last + 1 in (saved.n_positions, 0):
            length = saved.n_positions
            self._cells[sequence_id] = _Cells(saved.start, length, length, before=saved.before)
        else:
            self._remove(sequence_id, 0)

    def _go_back(self, sequence_id: int, saved: SavedHeads) -> None:
        """Cut a sequence as the target was cut to a checkpoint."""
        if saved.n_positions == UNKNOWN:
            return
        self._cut(sequence_id, saved.n_positions)
        cells = self._cells[sequence_id]
        if cells.n_positions == saved.n_positions and not cells.before and len(saved.before) == self._row_bytes:
            cells.before = saved.before

    def _n_waiting(self, sequence_id: int) -> int:
        return len(self._cells[sequence_id].waiting)

    def _restart(self, sequence_id: int, position: int) -> None:
        """Begin at a position after a gap: llama.cpp accepts any first position."""
        if position or self._cells[sequence_id].length:
            self._remove(sequence_id, 0)
        cells = self._cells[sequence_id]
        cells.start = cells.length = cells.n_positions = position
        cells.before, cells.newest = b"", -1
        cells.waiting.clear()

    def _remove(self, sequence_id: int, position: int) -> None:
        """Remove a sequence's cells from a position on."""
        self._llama.llama_memory_seq_rm(self._memory, sequence_id, position, _TO_THE_END)
        cells = self._cells[sequence_id]
        cells.length, cells.newest = min(cells.length, position), -1

    def _feed(self, sequence_ids: Collection[int], kept: int = 0) -> None:
        """Put waiting rows into the heads' cache; sequences for which that fails are forgotten."""
        rows = [(row, each) for each in sorted(sequence_ids) for row in self._take(each, kept)]
        for start in range(0, len(rows), self.n_batch):
            part = rows[start : start + self.n_batch]
            try:
                self._decode([(row.token, row.position, each, row.before) for row, each in part], has_outputs=False)
            except (Aborted, CacheFull, DecodeError):
                self._lose({each for _, each in rows})
                return

    def _take(self, sequence_id: int, kept: int) -> list[_Row]:
        """Remove and return the waiting rows of a sequence but the last ones, as rows that are in the cache."""
        cells = self._cells[sequence_id]
        end = max(len(cells.waiting) - kept, 0)
        taken, cells.waiting = cells.waiting[:end], cells.waiting[end:]
        if taken:
            cells.length = taken[-1].position + 1
        return taken

    # ---- drafting ----

    def is_ready(self, sequence_id: int, n_positions: int) -> bool:
        """Return whether a draft can follow these positions of a sequence, i.e. there is no gap before."""
        cells = self._cells[sequence_id]
        return self.is_on and cells.n_positions == n_positions and cells.newest == -1

    def begin(self, tokens: Sequence[tuple[int, int]]) -> list[int]:
        """Decode the newest tokens of sequences, with their waiting rows; return each one's row of logits.

        Args:
            tokens: sequence, in ascending order, and its token that the target has not decoded.

        Raises:
            Aborted, CacheFull, DecodeError: the sequences are forgotten.
        """
        sequences = [each for each, _ in tokens]
        if sum(map(self._n_waiting, sequences)) + len(tokens) > self.n_outputs:
            self._feed(sequences)
        rows: list[tuple[int, int, int, bytes]] = []
        found: list[int] = []
        for sequence_id, token in tokens:
            rows += [(row.token, row.position, sequence_id, row.before) for row in self._take(sequence_id, 0)]
            cells = self._cells[sequence_id]
            position = max(cells.n_positions, 0)
            rows.append((token, position, sequence_id, cells.before))
            cells.length, cells.newest = position + 1, token
            self._drafted[sequence_id] = 0
            found.append(len(rows) - 1)
        self._draft(sequences, rows, found)
        return found

    def go_on(self, tokens: Sequence[tuple[int, int]]) -> list[int]:
        """Decode drafted tokens of sequences after begin(), each with the head's own hidden state; as begin()."""
        rows = []
        for sequence_id, token in tokens:
            self._drafted[sequence_id] += 1
            position = self._cells[sequence_id].n_positions + self._drafted[sequence_id]
            rows.append((token, position, sequence_id, self._own[sequence_id]))
        sequences = [sequence_id for sequence_id, _ in tokens]
        self._draft(sequences, rows, range(len(rows)))
        return list(range(len(rows)))

    def _draft(self, sequences: Sequence[int], rows: list[tuple[int, int, int, bytes]], found: Sequence[int]) -> None:
        try:
            self._decode(rows, has_outputs=True)
        except (Aborted, CacheFull, DecodeError):
            self._lose(sequences)
            raise
        for sequence_id, row in zip(sequences, found, strict=True):
            address = ctypes.cast(self._functions.get_embedding(self._pointer, row), ctypes.c_void_p).value
            self._own[sequence_id] = ctypes.string_at(address, self._row_bytes) if address else b""

    def end(self, sequences: Iterable[int]) -> None:
        """Remove drafted cells: they hold the head's hidden states, not the target's."""
        for sequence_id in sequences:
            cells = self._cells[sequence_id]
            if self._drafted.pop(sequence_id, 0) and cells.n_positions != UNKNOWN:
                self._llama.llama_memory_seq_rm(self._memory, sequence_id, cells.length, _TO_THE_END)

    def logits(self, row: int) -> int:
        """Return the address of a row's logits."""
        return ctypes.cast(self._llama.llama_get_logits_ith(self._pointer, row), ctypes.c_void_p).value or 0

    def _decode(self, rows: Sequence[tuple[int, int, int, bytes]], *, has_outputs: bool) -> None:
        status = self._batch.decode(self._pointer, rows, has_outputs=has_outputs)
        if status == _ABORTED:
            raise Aborted
        if status == _NO_ROOM:
            raise CacheFull
        if status:
            raise DecodeError("llama.cpp could not compute the prediction heads", why=f"status {status}")

    # ---- measuring ----

    def decode(self, entries: Sequence[Entry]) -> None:
        """Decode tokens with hidden states of zeros, to measure the time; forget() has to follow."""
        self._decode([(token, position, each, b"") for token, position, each, _ in entries], has_outputs=True)

    def forget(self, sequence_id: int, position: int) -> bool:
        return bool(self._llama.llama_memory_seq_rm(self._memory, sequence_id, position, _TO_THE_END))


class _PairBatch:
    """A llama_batch in which each row has a token and a vector."""

    def __init__(self, llama: Any, size: int, row_bytes: int) -> None:
        self._llama, self._row_bytes = llama, row_bytes
        self._tokens, self._positions, self._sequences = ((ctypes.c_int32 * size)() for _ in range(3))
        self._outputs = (ctypes.c_int8 * size)()
        self._counts = (ctypes.c_int32 * size)(*[1] * size)
        start, step = ctypes.addressof(self._sequences), ctypes.sizeof(ctypes.c_int32)
        self._ids = (ctypes.c_void_p * size)(*range(start, start + step * size, step))
        self._vectors = (ctypes.c_uint8 * (size * row_bytes))()
        self._zeros = bytes(row_bytes)
        self._native = llama.llama_batch(
            token=self._tokens,
            embd=ctypes.cast(self._vectors, ctypes.POINTER(ctypes.c_float)),
            pos=self._positions,
            n_seq_id=self._counts,
            seq_id=ctypes.cast(self._ids, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self._outputs,
        )

    def decode(self, context: Any, rows: Sequence[tuple[int, int, int, bytes]], *, has_outputs: bool) -> int:
        """Decode (token, position, sequence, vector or nothing) rows; return llama_decode's status."""
        self._native.n_tokens = len(rows)
        address = ctypes.addressof(self._vectors)
        for index, (token, position, sequence_id, vector) in enumerate(rows):
            self._tokens[index], self._positions[index], self._sequences[index] = token, position, sequence_id
            self._outputs[index] = has_outputs
            ctypes.memmove(address + index * self._row_bytes, vector or self._zeros, self._row_bytes)
        return int(self._llama.llama_decode(context, self._native))

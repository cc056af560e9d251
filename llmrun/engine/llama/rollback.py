"""The last tokens of each sequence that a recurrent memory can take back.

llama.cpp keeps a snapshot of the state after each of the last tokens of a decode call (n_rs_seq of them). Its
llama_memory_seq_rm() also accepts lengths for which there is none, and the sequence then continues from a wrong state
(ggml-org/llama.cpp issue 26695); and where the states of several sequences are moved to be adjacent, their snapshots
are left behind. So this record decides, and never that function. Must not know llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from llmrun.engine.llama.base import Entry
from llmrun.engine.llama.followers import Follower, SavedHeads


class Rollback(Follower):
    """The record of one context's sequences.

    Args:
        most: snapshots of each sequence, beside its state.
        n_ubatch: tokens of a micro-batch.
    """

    def __init__(self, most: int, n_ubatch: int) -> None:
        self.most, self._n_ubatch = most, n_ubatch
        self._available: dict[int, int] = {}  # sequence -> last tokens with a snapshot before them
        self._pending: set[int] = set()  # sequences whose next decode continues from a snapshot
        self._unknown: set[int] = set()  # sequences whose state a failed decode has left half written

    def can_cut(self, sequence_id: int, n_dropped: int) -> bool:
        return sequence_id not in self._unknown and n_dropped <= self._available.get(sequence_id, 0)

    def is_pending(self, sequence_id: int) -> bool:
        """Return whether tokens were dropped since the last decode: llama.cpp can't share such a state."""
        return sequence_id in self._pending

    def cut(self, sequence_id: int, start: int, position: int, n_dropped: int) -> None:
        """Record that tokens were dropped, which is possible once after each decode, or that a sequence is empty."""
        if start == 0:
            self._replaced(sequence_id)
        elif n_dropped > 0:
            self._available.pop(sequence_id, None)
            self._pending.add(sequence_id)

    def decoded(self, entries: Sequence[Entry], *, is_batch: bool) -> None:
        rows = Counter(entry.sequence_id for entry in entries)
        # Each micro-batch may move the states of others, and leaves their snapshots behind. Sequences are computed in
        # one if they have equally many rows.
        is_whole = len(rows) == 1 or (len({*rows.values()}) == 1 and rows.total() <= self._n_ubatch)
        self._available.clear()
        self._pending.difference_update(rows)
        if is_batch and is_whole:  # the snapshot before a call's first token is not kept
            self._available.update((sequence_id, min(self.most, n_rows - 1)) for sequence_id, n_rows in rows.items())

    def lost(self, sequence_ids: Iterable[int]) -> None:
        self._unknown.update(sequence_ids)

    def restored(self, sequence_id: int, saved: SavedHeads, *, is_whole: bool) -> None:
        self._replaced(sequence_id)

    def _replaced(self, sequence_id: int) -> None:
        self._available.pop(sequence_id, None)
        self._pending.discard(sequence_id)
        self._unknown.discard(sequence_id)

    def copied(self, source: int, target: int) -> None:
        """Record that two sequences share a state: llama.cpp would drop tokens of both."""
        self._replaced(target)
        self._available.pop(source, None)

"""The last tokens of each sequence that a recurrent memory can take back.

llama.cpp keeps a snapshot of the state after each of the last tokens of a decode call (n_rs_seq of them). Its
llama_memory_seq_rm() also accepts lengths for which there is none, and the sequence then continues from a wrong state
(ggml-org/llama.cpp issue 26695); and where the states of several sequences are moved to be adjacent, their snapshots
are left behind. So this record decides, and never that function. Must not know llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Rollback:
    """The record of one context's sequences.

    Args:
        most: snapshots of each sequence, beside its state.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._available: dict[int, int] = {}  # sequence -> last tokens with a snapshot before them
        self._pending: set[int] = set()  # sequences whose next decode continues from a snapshot
        self._unknown: set[int] = set()  # sequences whose state a failed decode has left half written

    def can_drop(self, sequence_id: int, n_tokens: int) -> bool:
        """Return whether a sequence's last tokens can be dropped; with 0, whether its state is valid."""
        return sequence_id not in self._unknown and n_tokens <= self._available.get(sequence_id, 0)

    def is_pending(self, sequence_id: int) -> bool:
        """Return whether tokens were dropped since the last decode: llama.cpp can't share such a state."""
        return sequence_id in self._pending

    def dropped(self, sequence_id: int, n_tokens: int) -> None:
        """Record that tokens were dropped, which is possible once after each decode."""
        if n_tokens > 0:
            self._available.pop(sequence_id, None)
            self._pending.add(sequence_id)

    def decoded(self, sequence_ids: Iterable[int], n_ubatch: int) -> None:
        """Record a decode call.

        Args:
            sequence_ids: one per token.
            n_ubatch: tokens of a micro-batch; 0 if the tokens were not rows of one batch.
        """
        rows = Counter(sequence_ids)
        # Each micro-batch may move the states of others, and leaves their snapshots behind. Sequences are computed in
        # one if they have equally many rows.
        is_whole = len(rows) == 1 or (len({*rows.values()}) == 1 and rows.total() <= n_ubatch)
        self._available.clear()
        self._pending.difference_update(rows)
        if n_ubatch and is_whole:  # the snapshot before a call's first token is not kept
            self._available.update((sequence_id, min(self.most, n_rows - 1)) for sequence_id, n_rows in rows.items())

    def failed(self, sequence_ids: Iterable[int]) -> None:
        """Record a decode call that failed or was aborted: these sequences have to be emptied or replaced."""
        self._unknown.update(sequence_ids)

    def replaced(self, sequence_id: int) -> None:
        """Record that a sequence was emptied, or that its state was set."""
        self._available.pop(sequence_id, None)
        self._pending.discard(sequence_id)
        self._unknown.discard(sequence_id)

    def copied(self, source: int, target: int) -> None:
        """Record that two sequences share a state: llama.cpp would drop tokens of both."""
        self.replaced(target)
        self._available.pop(source, None)

    def moved(self) -> None:
        """Record that all states were moved into another context."""
        self._available.clear()
        self._pending.clear()

    def clear(self) -> None:
        """Record that all sequences were emptied."""
        self.moved()
        self._unknown.clear()

"""The followers of a context: records and second contexts that change with its sequences.

The context tells every follower of each change that it has made. Must not know contexts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmrun.engine.llama.base import Entry

UNKNOWN = -1
"""Number of positions of which nothing is known."""

# What follows a saved state of the target: a magic number, bytes of the heads' state and of the hidden state before the
# next token, the heads' first position, and the number of positions.
_FOOTER = struct.Struct("<8sQQqq")
_MAGIC = b"LLMRUNH1"


class SavedHeads(NamedTuple):
    """The heads' state of a sequence, as it is saved with the target's state."""

    state: bytearray | memoryview = bytearray()  # from llama.cpp; empty for a checkpoint of the target
    before: bytes = b""  # hidden state of the last position
    start: int = 0  # first position with a cell
    n_positions: int = UNKNOWN

    @property
    def parts(self) -> tuple[bytearray | memoryview, bytes, bytes]:
        """The bytes that follow the target's state."""
        footer = _FOOTER.pack(_MAGIC, len(self.state), len(self.before), self.start, self.n_positions)
        return self.state, self.before, footer

    @classmethod
    def split(cls, state: bytearray | memoryview) -> tuple[memoryview, SavedHeads]:
        """Return the target's state, and what follows it, without copies."""
        state = memoryview(state)
        end = len(state) - _FOOTER.size
        if end < 0 or state[end : end + len(_MAGIC)] != _MAGIC:
            return state, cls()
        _, n_state, n_before, start, n_positions = _FOOTER.unpack_from(state, end)
        middle, begin = end - n_before, end - n_before - n_state
        if begin < 0:
            return state, cls()
        return state[:begin], cls(state[begin:middle], bytes(state[middle:end]), start, n_positions)


class Follower:
    """A follower of a context's sequences that neither refuses nor does anything.

    Positions are llama.cpp's, which differ from the indexes of tokens after some images.
    """

    def can_cut(self, sequence_id: int, n_dropped: int) -> bool:
        """Return whether a sequence can lose its last positions; with 0, whether it can go on."""
        return True

    def can_save(self, sequence_id: int) -> bool:
        """Return whether what llama.cpp and saved() return is all of a sequence."""
        return True

    def decoded(self, entries: Sequence[Entry], *, is_batch: bool) -> None:
        """Take note of entries that were decoded.

        Args:
            is_batch: they were all rows of one batch; else only their sequences are valid, and later ones unknown.
        """

    def lost(self, sequence_ids: Iterable[int]) -> None:
        """Take note of sequences that a failed batch has left half written: they will be emptied or replaced."""

    def cut(self, sequence_id: int, start: int, position: int, n_dropped: int) -> None:
        """Forget a sequence's tokens from one on, whose index is `start`; later tokens are gone, or have moved."""

    def copied(self, source: int, target: int) -> None:
        """Give an empty sequence what another one has."""

    def saved(self, sequence_id: int, *, is_whole: bool) -> Sequence[bytes | bytearray | memoryview]:
        """Return what to save after the state of a sequence, or after a checkpoint of it."""
        return ()

    def saved_bytes(self, sequence_id: int) -> int:
        """Return the size of what saved() returns for a whole sequence, about."""
        return 0

    def restored(self, sequence_id: int, saved: SavedHeads, *, is_whole: bool) -> None:
        """Take note of a sequence that was replaced by its saved state, or that a checkpoint was put into."""

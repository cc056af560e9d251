"""What has to change with the sequences of a context, such as a record of their positions or a second context.

The context tells every follower of each change that it has made. Must not know contexts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llmrun.engine.llama.base import Entry

if TYPE_CHECKING:
    from llmrun.engine.llama.heads import SavedHeads


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
            is_batch: they were all rows of one batch; else only their sequences are valid, and what came after them is
                unknown.
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

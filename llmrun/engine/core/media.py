"""The images and audio of a prompt: their place among its tokens, and their way through the model.

In a sequence's tokens, a chunk (an image, a tile of one, or half a minute of audio) is a run of negative numbers made
from the file's hash. Code which compares tokens (prefixes, slots, saved states) never mistakes one for another. The
vectors are computed only when they are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from llmrun.engine.llama.base import MediaSpan

if TYPE_CHECKING:
    from llmrun.engine.llama.media import MediaChunk


def text_only(tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if token >= 0]


class PlacedChunk(NamedTuple):
    """A chunk, and the index of its first token."""

    start: int
    chunk: MediaChunk

    @property
    def end(self) -> int:
        """The index after its last token."""
        return self.start + len(self.chunk.ids)


@dataclass(frozen=True, slots=True)
class MediaPart:
    """The part of a chunk that one batch decodes; an engine.llama.base.EmbeddedInput."""

    placed: PlacedChunk
    start: int
    n_tokens: int
    sequence_id: int

    @property
    def span(self) -> MediaSpan:
        return MediaSpan(self.placed.start, self.placed.end, self.placed.chunk.n_positions)

    @property
    def causal(self) -> bool:
        return self.placed.chunk.causal

    @property
    def encoded(self) -> float:
        return self.placed.chunk.encoded

    def positions(self, first: int) -> Sequence[int]:
        """Return the positions of the part's vectors if the chunk begins at position first."""
        offset = self.start - self.placed.start
        return self.placed.chunk.positions(first, slice(offset, offset + self.n_tokens))

    def address(self) -> int:
        return self.placed.chunk.address(self.start - self.placed.start)


class PromptMedia:
    """The images and audio of one prompt, in their order."""

    def __init__(self, placed: Sequence[PlacedChunk]) -> None:
        self._chunks = placed
        self._had_turn = False

    @property
    def n_tokens(self) -> int:
        return sum(len(placed.chunk.ids) for placed in self._chunks)

    @property
    def seconds(self) -> float:
        return sum(placed.chunk.seconds for placed in self._chunks)

    def at(self, index: int) -> PlacedChunk | None:
        return next((placed for placed in self._chunks if placed.start <= index < placed.end), None)

    def n_batchable(self, start: int, end: int) -> int:
        """Return how many tokens from start on fit into one batch: text up to the next chunk, or one chunk."""
        chunk = self.at(start)
        if chunk is not None:
            return chunk.end - start
        return min((placed.start for placed in self._chunks if placed.start > start), default=end) - start

    def next_part(self, start: int, share: int, slot: int) -> MediaPart | None:
        """Return the part of a chunk that begins at a token, at most share tokens if causal; None for text."""
        chunk = self.at(start)
        if chunk is None:
            return None
        return MediaPart(chunk, start, share if chunk.chunk.causal else chunk.end - start, slot)

    def takes_turn(self) -> bool:
        """Return every second time True: chunks alternate with the text of other sequences."""
        self._had_turn = not self._had_turn
        return self._had_turn

    def close(self) -> None:
        for placed in self._chunks:
            placed.chunk.close()

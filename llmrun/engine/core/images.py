"""The images and audio of a prompt: their place among its tokens, and their way through the model.

In a sequence's tokens, an image is a run of negative numbers made from its hash, and so is audio. Code which compares
tokens (prefixes, slots, saved states) never mistakes one for another. The vectors are computed only when they are
decoded. Must not know llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llmrun.engine.llama.base import ImageSpan


def text_only(tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if token >= 0]


class ImageChunk(Protocol):
    """An image, or a tile of a large one, as vectors instead of tokens.

    Attributes:
        ids: its token ids in a sequence, all negative.
        n_positions: positions that it occupies.
        causal: each vector sees only those before it; otherwise all are decoded in one batch.
    """

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def n_positions(self) -> int: ...

    @property
    def causal(self) -> bool: ...

    @property
    def seconds(self) -> float: ...

    def positions(self, first: int, indexes: slice) -> Sequence[int]:
        """Return the positions of these vectors if the chunk begins at position first; see EmbeddedInput."""

    def address(self, first: int) -> int:
        """Return the address of the floats from vector first on; compute the vectors at the first call."""

    def close(self) -> None:
        """Free the vectors."""


class PlacedChunk(NamedTuple):
    """A chunk, and the index of its first token."""

    start: int
    chunk: ImageChunk

    @property
    def end(self) -> int:
        """The index after its last token."""
        return self.start + len(self.chunk.ids)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """The part of a chunk that one batch decodes; an engine.llama.base.EmbeddedInput."""

    placed: PlacedChunk
    start: int
    n_tokens: int
    sequence_id: int

    @property
    def span(self) -> ImageSpan:
        return ImageSpan(self.placed.start, self.placed.end, self.placed.chunk.n_positions)

    @property
    def causal(self) -> bool:
        return self.placed.chunk.causal

    def positions(self, first: int) -> Sequence[int]:
        """Return the positions of the part's vectors if the chunk begins at position first."""
        offset = self.start - self.placed.start
        return self.placed.chunk.positions(first, slice(offset, offset + self.n_tokens))

    def address(self) -> int:
        return self.placed.chunk.address(self.start - self.placed.start)


class PromptImages:
    """The images of one prompt, in their order."""

    def __init__(self, placed: Sequence[PlacedChunk]) -> None:
        self._placed = placed
        self._had_turn = False

    @property
    def n_tokens(self) -> int:
        return sum(len(each.chunk.ids) for each in self._placed)

    @property
    def seconds(self) -> float:
        return sum(each.chunk.seconds for each in self._placed)

    def at(self, index: int) -> PlacedChunk | None:
        return next((each for each in self._placed if each.start <= index < each.end), None)

    def n_batchable(self, start: int, end: int) -> int:
        """Return how many tokens from start on fit into one batch: text up to the next image, or one image."""
        chunk = self.at(start)
        if chunk is not None:
            return chunk.end - start
        return min((each.start for each in self._placed if each.start > start), default=end) - start

    def next_part(self, start: int, share: int, slot: int) -> ImagePart | None:
        """Return the part of an image that begins at a token, at most share tokens if causal; None for text."""
        chunk = self.at(start)
        if chunk is None:
            return None
        return ImagePart(chunk, start, share if chunk.chunk.causal else chunk.end - start, slot)

    def takes_turn(self) -> bool:
        """Return every second time True: images alternate with the text of other sequences."""
        self._had_turn = not self._had_turn
        return self._had_turn

    def close(self) -> None:
        for each in self._placed:
            each.chunk.close()

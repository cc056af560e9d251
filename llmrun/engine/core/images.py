"""Where the pictures of a prompt stand, and how they go through the model.

Owns what a batch may hold of them. In a sequence's tokens a picture is a run of negative numbers made of its hash, so
that whatever compares tokens (prefixes, slots, saved states) never takes one picture for another; the vectors that
stand for them are only made where they are computed. Must not know llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llmrun.engine.llama.base import ImageSpan


def text_only(tokens: Sequence[int]) -> list[int]:
    """The tokens without those that stand for pictures."""
    return [token for token in tokens if token >= 0]


class ImageChunk(Protocol):
    """A picture, or one part of a large one, as vectors in place of tokens.

    Attributes:
        ids: what stands for them in a sequence's tokens.
        n_positions: that they take.
        causal: whether each of them sees only those before it; else all go through the model at once.
        seconds: what making the vectors took.
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
        """Of the tokens with these indexes, see engine.llama.base.Embedded."""

    def address(self, first: int) -> int:
        """Of the floats of the first vector that is wanted and those behind it; made where nobody wanted them yet."""

    def close(self) -> None:
        """Give the memory back; nobody asks for vectors any more."""


class PlacedChunk(NamedTuple):
    """A chunk, and the index of its first token."""

    start: int
    chunk: ImageChunk

    @property
    def end(self) -> int:
        """The index behind its last token."""
        return self.start + len(self.chunk.ids)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """See engine.llama.base.Embedded."""

    placed: PlacedChunk
    start: int
    n_tokens: int
    sequence_id: int

    @property
    def span(self) -> ImageSpan:
        """Of the whole chunk."""
        return ImageSpan(self.placed.start, self.placed.end, self.placed.chunk.n_positions)

    @property
    def causal(self) -> bool:
        """Whether each position sees only those before it."""
        return self.placed.chunk.causal

    def positions(self, first: int) -> Sequence[int]:
        """If the chunk begins at position first."""
        inside = self.start - self.placed.start
        return self.placed.chunk.positions(first, slice(inside, inside + self.n_tokens))

    def address(self) -> int:
        """Of the vectors."""
        return self.placed.chunk.address(self.start - self.placed.start)


class PromptImages:
    """The pictures of one prompt.

    Args:
        placed: in the order in which they stand there.
    """

    def __init__(self, placed: Sequence[PlacedChunk]) -> None:
        self._placed = placed
        self._had_turn = False

    @property
    def n_tokens(self) -> int:
        """That they take."""
        return sum(len(each.chunk.ids) for each in self._placed)

    @property
    def seconds(self) -> float:
        """What making their vectors took."""
        return sum(each.chunk.seconds for each in self._placed)

    def at(self, position: int) -> PlacedChunk | None:
        """The one that a token is part of."""
        return next((each for each in self._placed if each.start <= position < each.end), None)

    def n_alike(self, start: int, end: int) -> int:
        """How many of the tokens from start to end - 1 can go through the model together: text, or of one picture."""
        inside = self.at(start)
        if inside is not None:
            return inside.end - start
        return min((each.start for each in self._placed if each.start > start), default=end) - start

    def next_part(self, start: int, share: int, slot: int) -> ImagePart | None:
        """What comes next of a picture; None where text does."""
        inside = self.at(start)
        if inside is None:
            return None
        return ImagePart(inside, start, share if inside.chunk.causal else inside.end - start, slot)

    def takes_turn(self) -> bool:
        """Whether it is a picture's turn, where others could go on with text; every second time."""
        self._had_turn = not self._had_turn
        return self._had_turn

    def close(self) -> None:
        """Give the memory back."""
        for each in self._placed:
            each.chunk.close()

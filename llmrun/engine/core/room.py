"""How many cells of the KV cache each slot uses, shared ones counted once. Pure; knows neither tokens nor llama.cpp."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class _Piece:
    """The first cells of a block, as one slot holds them. Slots that share a prefix hold the same blocks."""

    block: int
    length: int


class CellBudget:
    """Counts cells.

    A slot's positions are pieces of blocks, back to back. A block grows at its end only, and only for a slot that holds
    all of it; any other slot goes on in a block of its own. So of a block, as many cells are used as its longest piece
    has, and a cell is free when the last slot that holds it is cut.

    Args:
        n_cells: of the KV cache in all.
    """

    def __init__(self, n_cells: int) -> None:
        self.n_cells = n_cells
        self.used = 0
        """Cells that some slot holds."""
        self.shared = 0
        """Cells that more than one slot holds."""
        self._pieces: dict[int, list[_Piece]] = {}
        self._blocks: dict[int, int] = {}  # block -> its longest piece
        self._names = itertools.count()

    def admits(self, n_tokens: int) -> bool:
        """Whether there are free cells for so many more tokens."""
        return self.used + n_tokens <= self.n_cells

    def held(self, slots: Iterable[int], lengths: Mapping[int, int] | None = None) -> int:
        """Cells that these slots hold together: what would be left if all others were emptied.

        Args:
            lengths: slot -> how many first positions of it count; all of them where it is not named.
        """
        longest: dict[int, int] = {}
        for slot in slots:
            left = (lengths or {}).get(slot, self.n_cells)
            for piece in self._pieces.get(slot, ()):
                longest[piece.block] = max(longest.get(piece.block, 0), min(piece.length, left))
                left -= min(piece.length, left)
        return sum(longest.values())

    def append(self, slot: int, n_tokens: int) -> None:
        """A slot has so many tokens more."""
        pieces = self._pieces.setdefault(slot, [])
        if not pieces or pieces[-1].length != self._blocks[pieces[-1].block]:
            pieces.append(_Piece(next(self._names), 0))
        last = pieces[-1]
        last.length += n_tokens
        self._blocks[last.block] = last.length
        self.used += n_tokens

    def cut(self, slot: int, length: int) -> None:
        """A slot has only its first positions now."""
        if length < self.length(slot):
            self._hold(slot, self._first(slot, length))

    def share(self, source: int, target: int, length: int) -> None:
        """In place of what it held, the target holds the source's first positions too."""
        self._hold(target, self._first(source, length))

    def drop(self, slot: int, start: int, end: int) -> None:
        """A slot's positions from start to end - 1 are gone, those behind them moved there. Nobody shares them."""
        rest = self.length(slot) - end
        self.cut(slot, start)
        self.append(slot, rest)

    def is_shared(self, slot: int, start: int) -> bool:
        """Whether another slot holds a cell of this one's from position start on."""
        freed = self.used - self.held(self._pieces, {slot: start})
        return freed < self.length(slot) - start

    def length(self, slot: int) -> int:
        """How many positions a slot has."""
        return sum(piece.length for piece in self._pieces.get(slot, ()))

    def _first(self, slot: int, length: int) -> list[_Piece]:
        """Copies of the pieces that hold a slot's first positions."""
        kept: list[_Piece] = []
        for piece in self._pieces.get(slot, ()):
            if length <= 0:
                break
            kept.append(_Piece(piece.block, min(piece.length, length)))
            length -= piece.length
        return kept

    def _hold(self, slot: int, pieces: list[_Piece]) -> None:
        self._pieces[slot] = pieces
        self._blocks = {}
        shared: dict[int, int] = {}  # block -> its second longest piece
        for each in itertools.chain.from_iterable(self._pieces.values()):
            longest = self._blocks.get(each.block, 0)
            self._blocks[each.block] = max(longest, each.length)
            shared[each.block] = max(shared.get(each.block, 0), min(longest, each.length))
        self.used, self.shared = sum(self._blocks.values()), sum(shared.values())

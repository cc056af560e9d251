"""A count of the KV cache cells that each slot uses, shared ones counted once. Pure; must not know tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class _Piece:
    """A slot's part of a block: its first `length` cells."""

    block: int
    length: int


class CellBudget:
    """The used and shared cells of a KV cache.

    A slot's positions are pieces of blocks, back to back; slots that share a prefix have pieces of the same blocks.
    Only a slot that holds all of a block can extend it; any other slot continues in a new block. So a block uses as
    many cells as its longest piece has, and a cell is free when the last slot that holds it is cut.

    Attributes:
        n_cells: cells in total.
        used: cells that any slot holds.
        shared: cells that more than one slot holds.
        touched: cells that were ever used, and so have taken memory.
    """

    def __init__(self, n_cells: int, *, shares_cells: bool = True) -> None:
        """Start empty.

        Args:
            shares_cells: cells that a slot has left are used again by others; else each has cells of its own.
        """
        self.n_cells = n_cells
        self.used = self.shared = self.touched = 0
        self._shares_cells = shares_cells
        self._longest: dict[int, int] = {}  # where cells are not shared, slot -> the most tokens that it ever had
        self._pieces: dict[int, list[_Piece]] = {}
        self._blocks: dict[int, int] = {}  # block -> its longest piece
        self._numbers = itertools.count()

    def admits(self, n_tokens: int) -> bool:
        return self.used + n_tokens <= self.n_cells

    def count(self, slots: Iterable[int], lengths: Mapping[int, int] | None = None) -> int:
        """Return the number of cells that these slots use together, as if all others were empty.

        Args:
            lengths: slot -> number of its first positions to count; all for a slot that is missing here.
        """
        longest: dict[int, int] = {}
        for slot in slots:
            remaining = (lengths or {}).get(slot, self.n_cells)
            for piece in self._pieces.get(slot, ()):
                longest[piece.block] = max(longest.get(piece.block, 0), min(piece.length, remaining))
                remaining -= min(piece.length, remaining)
        return sum(longest.values())

    def append(self, slot: int, n_tokens: int) -> None:
        """Extend a slot."""
        pieces = self._pieces.setdefault(slot, [])
        if not pieces or pieces[-1].length != self._blocks[pieces[-1].block]:
            pieces.append(_Piece(next(self._numbers), 0))
        last = pieces[-1]
        last.length += n_tokens
        self._blocks[last.block] = last.length
        self.used += n_tokens
        if self._shares_cells:
            self.touched = max(self.touched, self.used)
        elif (grown := self.length(slot) - self._longest.get(slot, 0)) > 0:
            self._longest[slot] = self._longest.get(slot, 0) + grown
            self.touched += grown

    def cut(self, slot: int, length: int) -> None:
        if length < self.length(slot):
            self._set_pieces(slot, self._first_pieces(slot, length))

    def share(self, source: int, target: int, length: int) -> None:
        """Replace the target's positions by the source's first ones, shared."""
        self._set_pieces(target, self._first_pieces(source, length))

    def drop(self, slot: int, start: int, end: int) -> None:
        """Remove positions start to end - 1 of a slot; those after them move down. None of them may be shared."""
        n_after = self.length(slot) - end
        self.cut(slot, start)
        self.append(slot, n_after)

    def is_shared(self, slot: int, start: int) -> bool:
        """Return whether another slot holds a cell of this one's positions from start on."""
        freed = self.used - self.count(self._pieces, {slot: start})
        return freed < self.length(slot) - start

    def length(self, slot: int) -> int:
        return sum(piece.length for piece in self._pieces.get(slot, ()))

    def _first_pieces(self, slot: int, length: int) -> list[_Piece]:
        """Return copies of the pieces that hold a slot's first positions."""
        pieces: list[_Piece] = []
        for piece in self._pieces.get(slot, ()):
            if length <= 0:
                break
            pieces.append(_Piece(piece.block, min(piece.length, length)))
            length -= piece.length
        return pieces

    def _set_pieces(self, slot: int, pieces: list[_Piece]) -> None:
        self._pieces[slot] = pieces
        self._blocks = {}
        shared: dict[int, int] = {}  # block -> its second longest piece
        for piece in itertools.chain.from_iterable(self._pieces.values()):
            longest = self._blocks.get(piece.block, 0)
            self._blocks[piece.block] = max(longest, piece.length)
            shared[piece.block] = max(shared.get(piece.block, 0), min(longest, piece.length))
        self.used, self.shared = sum(self._blocks.values()), sum(shared.values())

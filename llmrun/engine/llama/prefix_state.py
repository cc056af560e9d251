"""The state of a sequence's first tokens, for another stream of the same KV cache; or all of it, in pieces.

llama.cpp exports whole sequences only, at once. While it does, its reads of the cache's buffers are noted instead of
done, and afterwards the first tokens' part of each is copied: a prefix of a long conversation costs what the prefix
takes. Or all of each is copied, a piece after the other, between the steps of other sequences.

Must not know contexts.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from llmrun.engine.llama.base import ALLOCATING
from llmrun.engine.llama.library import bytes_of
from llmrun.engine.llama.zeroing import noting_reads

_COUNT = struct.Struct("=I")
_MAGIC_BYTES = 8
_BLOCK_BYTES = 8  # before the keys: whether values are transposed, and the number of layers
_TENSOR_BYTES = 12  # before each layer's keys or values: their type, and the bytes of a cell
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)
_MIN_CELL_BYTES = 12  # of a cell's position, number of sequences, and sequence


class _Read(NamedTuple):
    """A read of the cache that was noted: a layer's keys or values of all the sequence's cells."""

    start: int  # in the exported state, or in memory
    address: int
    size: int


def prefix_state(
    export: Callable[[int], int], n_bytes: int, sequence_id: int, length: int, buffers: Sequence[int]
) -> Any:
    """Return the state of a sequence's first tokens, an array; None if they are not the first of its cells, in order.

    Args:
        export: writes the sequence's state to an address, of a context in which each sequence has a stream.
        n_bytes: its size.
        length: number of tokens, each with its index as position.
        buffers: of the KV cache.
    """
    if sys.platform != "linux":
        return None  # no buffer's reads can be noted
    try:
        # Takes memory only where it is written.
        memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except OSError:
        return None
    base, reads = ctypes.addressof((ctypes.c_uint8 * n_bytes).from_buffer(memory)), list[_Read]()
    with noting_reads(buffers, lambda address, target, size: reads.append(_Read(target - base, address, size))):
        n_written = export(base)
    n_short = _shorten(memory, base, n_written, reads, sequence_id, length)
    return (ctypes.c_uint8 * n_short).from_buffer(memory) if n_short else None


def state_memory(n_bytes: int) -> memoryview:
    """Return zeros for a state, which take memory where they are written.

    Raises:
        MemoryError: there is none.
    """
    if sys.platform != "linux":
        return memoryview(bytearray(n_bytes))
    try:
        return memoryview(mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise MemoryError from error


def export_in_pieces(
    export: Callable[[int], int], memory: memoryview, buffers: Sequence[int], piece_bytes: int
) -> Generator[None, None, int]:
    """Export a sequence's state, its keys and values in pieces; return the number of bytes that the export reports.

    Args:
        export: as in prefix_state().
        memory: for the state.
        buffers: of the KV cache; without any, all is copied at once.
        piece_bytes: copied before each yield, at most.
    """
    base, reads, n_bytes = ctypes.addressof(bytes_of(memory)), list[_Read](), 0
    with ALLOCATING, noting_reads(buffers, lambda address, target, size: reads.append(_Read(target, address, size))):
        n_written = export(base)
    for start, address, size in reads:
        for offset in range(0, size, piece_bytes):
            length = min(piece_bytes, size - offset)
            if n_bytes + length > piece_bytes:
                n_bytes = 0
                yield
            with ALLOCATING:
                ctypes.memmove(start + offset, address + offset, length)
            n_bytes += length
    return n_written


def _shorten(memory: mmap.mmap, base: int, end: int, reads: list[_Read], sequence_id: int, length: int) -> int:
    """Cut a state to its first `length` cells, in place; return its new size, 0 if its form is not the expected one."""
    counted = _MAGIC_BYTES + _COUNT.size * (1 + sequence_id)
    begin = counted + _COUNT.size
    if not reads or end < begin:
        return 0
    n_cells = int(_COUNT.unpack_from(memory, counted)[0])
    cells_end = reads[0].start - _TENSOR_BYTES - _BLOCK_BYTES
    if not 0 < length <= n_cells or (cells_end - begin) % n_cells:
        return 0
    cell_bytes = (cells_end - begin) // n_cells
    short_end = begin + length * cell_bytes
    if cell_bytes < _MIN_CELL_BYTES or not _are_first(memory[begin:short_end], cell_bytes):
        return 0
    _COUNT.pack_into(memory, counted, length)
    if len(reads) > 1 and reads[1].start == reads[0].start + reads[0].size:
        return 0  # its cells are in several pieces, which are read one after the other
    read_end = cells_end
    for start, address, size in reads:
        if size % n_cells:
            return 0
        for source, n_bytes in ((base + read_end, start - read_end), (address, size // n_cells * length)):
            ctypes.memmove(base + short_end, source, n_bytes)
            short_end += n_bytes
        read_end = start + size
    ctypes.memmove(base + short_end, base + read_end, end - read_end)
    return short_end + end - read_end


def _are_first(cells: bytes, cell_bytes: int) -> bool:
    """Return whether the positions of these cells are 0, 1, 2 and so on."""
    positions = [position for (position,) in struct.iter_unpack(f"=i{cell_bytes - 4}x", cells)]
    return positions == list(range(len(positions)))

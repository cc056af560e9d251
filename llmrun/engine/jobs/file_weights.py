"""Weights read from a model's file, because memory may hold them repacked or on a GPU; and a top-k over their chunks.

Owns the place of a tensor's rows in the file, and the size of the chunks in which a large matrix is dequantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llmrun.engine.llama.quants import Array, Quants
from llmrun.gguf.header import Header, Tensor
from llmrun.gguf.split import other_parts

_MAX_ELEMENTS = 1 << 22  # of a dequantized chunk, and of a result computed from it


class FileWeights:
    """The tensors of a model's file, or of its parts."""

    def __init__(self, header: Header, threads: int) -> None:
        self.header = header
        self._tensors = {tensor.name: tensor for tensor in self.header.tensors}
        self._quants = Quants(threads)

    def find(self, *names: str) -> Tensor | None:
        return next((self._tensors[name] for name in names if name in self._tensors), None)

    def rows(self, tensor: Tensor, start: int = 0, end: int = 1) -> Array:
        """Return rows [start, end) of a matrix, float32 [rows, columns]."""
        kind, columns = self._quants.numbers[tensor.type.upper()], tensor.shape[0]
        size = self._quants.row_bytes(kind, columns)
        data = np.memmap(self._part(tensor), np.uint8, "r", tensor.offset + start * size, (end - start) * size)
        return self._quants.unpack(kind, np.array(data), columns)

    def chunks(self, tensor: Tensor, n_vectors: int) -> Iterator[tuple[int, Array]]:
        """Yield a whole matrix in chunks of rows, each with the index of its first row.

        Args:
            n_vectors: vectors that each row will be multiplied with; more make the chunks smaller.
        """
        columns, count = tensor.shape[:2]
        step = max(1, _MAX_ELEMENTS // max(columns, n_vectors))
        for start in range(0, count, step):
            yield start, self.rows(tensor, start, min(start + step, count))

    def _part(self, tensor: Tensor) -> Path:
        path = self.header.path
        return path.with_name(other_parts(self.header)[tensor.part - 1]) if tensor.part else path


class TopK:
    """The highest numbers of each row of a matrix that is computed in chunks of columns.

    Attributes:
        numbers: float32 [rows, up to count], the highest first.
        columns: int64 of the same shape: their columns.
    """

    def __init__(self, n_rows: int, count: int) -> None:
        self.numbers: Array = np.empty((n_rows, 0), np.float32)
        self.columns: Array = np.empty((n_rows, 0), np.int64)
        self._count = count

    def take(self, start: int, numbers: Array) -> None:
        """Add the next columns, from column `start` on: float32 [rows, columns]."""
        count = min(self._count, numbers.shape[1])
        places = np.sort(np.argpartition(-numbers, count - 1, axis=1)[:, :count], axis=1)
        found = np.concatenate([self.numbers, np.take_along_axis(numbers, places, 1)], axis=1)
        columns = np.concatenate([self.columns, places + start], axis=1)
        order = np.argsort(-found, axis=1, kind="stable")[:, : self._count]
        self.numbers, self.columns = (np.take_along_axis(each, order, 1) for each in (found, columns))

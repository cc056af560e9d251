"""A model's weights, read from its files, because memory may hold them repacked or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llmrun import _native
from llmrun.engine.llama.base import Aborted
from llmrun.engine.llama.quants import Array, Quants
from llmrun.gguf.header import Header, Tensor, other_parts

_MAX_ELEMENTS = 1 << 22  # of a dequantized chunk, and of a result computed from it


class FileWeights:
    """The tensors of a model's file, or of its parts.

    Args:
        flag: stops chunks().

    Attributes:
        tensors: name -> tensor.
        quants: ggml's quantization.
    """

    def __init__(self, header: Header, threads: int, flag: _native.CancelFlag | None = None) -> None:
        self.header = header
        self._flag = flag
        self.tensors = {tensor.name: tensor for tensor in header.tensors}
        self.quants = Quants(threads)

    def find(self, *names: str) -> Tensor | None:
        return next((self.tensors[name] for name in names if name in self.tensors), None)

    def type_number(self, tensor: Tensor) -> int:
        """Return ggml's number of a tensor's type."""
        return self.quants.numbers[tensor.type.upper()]

    def stored(self, tensor: Tensor) -> Array:
        """Map a tensor's bytes, uint8."""
        return np.memmap(self._part(tensor), np.uint8, "r", tensor.offset, tensor.n_bytes)

    def rows(self, tensor: Tensor, start: int = 0, end: int = 1) -> Array:
        """Return rows [start, end) of a matrix, float32 [rows, columns]."""
        number, columns = self.type_number(tensor), tensor.shape[0]
        size = self.quants.row_bytes(number, columns)
        data = np.memmap(self._part(tensor), np.uint8, "r", tensor.offset + start * size, (end - start) * size)
        return self.quants.unpack(number, np.array(data), columns)

    def chunks(self, tensor: Tensor, n_vectors: int) -> Iterator[tuple[int, Array]]:
        """Yield a whole matrix in chunks of rows, each with the index of its first row.

        Args:
            n_vectors: vectors that each row will be multiplied with; more make the chunks smaller.

        Raises:
            Aborted: the flag was set.
        """
        columns, count = tensor.shape[:2]
        step = max(1, _MAX_ELEMENTS // max(columns, n_vectors))
        for start in range(0, count, step):
            if self._flag is not None and self._flag.is_set:
                raise Aborted
            yield start, self.rows(tensor, start, min(start + step, count))

    def _part(self, tensor: Tensor) -> Path:
        path = self.header.path
        return path.with_name(other_parts(self.header)[tensor.part - 1]) if tensor.part else path

"""ggml's quantization of rows: to blocks and back.

Owns the calls of ggml's functions; must not know models. Rows are float32 arrays.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from llmrun.engine.llama.ggml import type_numbers
from llmrun.engine.llama.library import function

Array = Any  # NumPy's array; its own types say little more

F32, F16 = 0, 1  # ggml_type
_PIECE_ELEMENTS = 1 << 20  # per thread at a time


class _Traits(ctypes.Structure):
    """The beginning of struct ggml_type_traits."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    )


class Quants:
    """ggml's quantization functions on several threads.

    Attributes:
        numbers: ggml's upper-case name of a type -> its number.
        run: map() on all threads.
    """

    def __init__(self, threads: int) -> None:
        rows = (*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p)
        self._chunk = function("ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, *rows)
        self._get_traits = function("ggml_get_type_traits", ctypes.POINTER(_Traits), ctypes.c_int)
        self._pool = ThreadPoolExecutor(threads)
        self.run = self._pool.map
        self.numbers = type_numbers()

    @cache  # noqa: B019 - lives as long as the job
    def _traits(self, type_number: int) -> _Traits:
        return self._get_traits(type_number).contents  # type: ignore[no-any-return]

    def row_bytes(self, type_number: int, columns: int) -> int:
        traits = self._traits(type_number)
        return int(columns // traits.blck_size * traits.type_size)

    def unpack(self, type_number: int, data: Array, columns: int) -> Array:
        """Dequantize rows.

        Args:
            data: contiguous bytes of whole rows, uint8.

        Returns:
            float32 [rows, columns].
        """
        rows = len(data) // self.row_bytes(type_number, columns)
        if type_number == F32:
            return data.view(np.float32).reshape(rows, columns)
        out = np.empty((rows, columns), np.float32)
        to_float = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(
            self._traits(type_number).to_float
        )
        to_float(data.ctypes.data, out.ctypes.data, out.size)
        return out

    def pack(self, type_number: int, rows: Array, importance: Array | None = None) -> Array:
        """Quantize rows.

        Args:
            rows: contiguous float32 [rows, columns].
            importance: float32 [columns], or None.

        Returns:
            bytes, uint8.
        """
        count, columns = rows.shape
        out = np.empty(count * self.row_bytes(type_number, columns), np.uint8)
        weights = None if importance is None else importance.ctypes.data
        self._chunk(type_number, rows.ctypes.data, out.ctypes.data, 0, count, columns, weights)
        return out

    def rounded(self, type_number: int, rows: Array, importance: Array | None = None) -> Array:
        """Quantize rows and dequantize them again: float32 [rows, columns]."""
        return self.unpack(type_number, self.pack(type_number, rows, importance), rows.shape[1])

    def repack(self, before: int, data: Array, columns: int, through: int | None, after: int) -> Array:
        """Convert a whole tensor to another type, on all threads.

        Args:
            data: bytes of type `before`, uint8.
            through: type to round the values to on the way, None for none.

        Returns:
            bytes of type `after`, uint8.
        """
        row = self.row_bytes(before, columns)
        step = max(1, _PIECE_ELEMENTS // columns) * row

        def piece(start: int) -> Array:
            rows = self.unpack(before, data[start : start + step], columns)
            return self.pack(after, rows if through is None else self.rounded(through, rows))

        return np.concatenate(list(self.run(piece, range(0, len(data), step))))

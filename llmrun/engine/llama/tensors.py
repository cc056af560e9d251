"""ggml's tensors in memory: names, shapes and numbers, while a model computes or in its file.

Owns struct ggml_tensor and ggml's numbers of types and operations; must not know what they are used for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from llmrun.engine.llama.library import function, import_llama
from llmrun.errors import LlmrunError

_MAX_SOURCES, _NAME_BYTES, _PARAMETER_BYTES = 10, 64, 64  # GGML_MAX_SRC, GGML_MAX_NAME, GGML_MAX_OP_PARAMS
_OBJECT_BYTES = 32  # ggml_tensor_overhead() counts the object around a tensor too
_OPERATIONS = 64  # more than there are numbers before MUL_MAT_ID's


class GgmlTensor(ctypes.Structure):
    """struct ggml_tensor."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),  # elements of each dimension, the contiguous one first
        ("nb", ctypes.c_size_t * 4),  # stride of each dimension in bytes
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * (_PARAMETER_BYTES // 4)),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * _MAX_SOURCES),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * _NAME_BYTES),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )

    @property
    def plain_name(self) -> str:
        """The tensor's name; ggml calls its copy on another device "CUDA0#NAME#0"."""
        text: str = self.name.decode("utf-8", "replace")
        return text.split("#")[1] if "#" in text else text

    def source(self, index: int) -> GgmlTensor:
        """Return an input of the operation that computes this tensor."""
        return GgmlTensor.from_address(self.src[index])


def check_layout() -> None:
    """Compare our struct ggml_tensor with the library's.

    Raises:
        LlmrunError: the layouts differ.
    """
    if function("ggml_tensor_overhead", ctypes.c_size_t)() != ctypes.sizeof(GgmlTensor) + _OBJECT_BYTES:
        raise LlmrunError("ggml_tensor has an unexpected size on this platform")


def operation_numbers() -> dict[str, int]:
    """Return ggml's operations: name, e.g. "MUL_MAT" -> number."""
    name = function("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
    return {name(number).decode(): number for number in range(_OPERATIONS)}


def type_numbers() -> dict[str, int]:
    """Return ggml's types: upper-case name -> number."""
    name = function("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
    names = ((name(number), number) for number in range(import_llama().GGML_TYPE_COUNT))
    return {text.decode().upper(): number for text, number in names if text}


def row_check() -> Callable[[int, int, int], bool]:
    """Return a function of a type's number, an address and a number of bytes: are all numbers there finite?"""
    check: Callable[[int, int, int], bool] = function(
        "ggml_validate_row_data", ctypes.c_bool, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    )
    return check


class TensorNumbers:
    """A reader of tensors' numbers while a model computes."""

    def __init__(self) -> None:
        pointer = ctypes.c_void_p
        self._is_host = function("ggml_backend_buffer_is_host", ctypes.c_bool, pointer)
        self._get = function("ggml_backend_tensor_get", None, pointer, pointer, ctypes.c_size_t, ctypes.c_size_t)
        self._bytes = function("ggml_nbytes", ctypes.c_size_t, pointer)

    def __call__(self, tensor: GgmlTensor, kind: Any = ctypes.c_float) -> Any:
        """Return a tensor's elements as a 4-dimensional array, the contiguous dimension last; copied from a GPU."""
        import numpy as np

        address = ctypes.addressof(tensor)
        size = self._bytes(address)
        if self._is_readable(tensor):
            flat: Any = np.frombuffer((ctypes.c_char * size).from_address(tensor.data), kind)
        else:
            flat = np.empty(size // ctypes.sizeof(kind), kind)
            self._get(address, flat.ctypes.data, 0, size)
        return np.lib.stride_tricks.as_strided(flat, tensor.ne[::-1], tensor.nb[::-1], writeable=False)

    def _is_readable(self, tensor: GgmlTensor) -> bool:
        """Return whether the process can read the data in place."""
        return not tensor.buffer or bool(self._is_host(tensor.buffer))

"""ggml's tensors in memory, while a model computes or in its file, and the timing of its operations without a model.

Owns struct ggml_tensor and ggml's numbers of types and operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

from llmrun.engine.llama.devices import CPU
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

    def __call__(self, tensor: GgmlTensor, element: Any = ctypes.c_float) -> Any:
        """Return a tensor's elements as a 4-dimensional array, the contiguous dimension last; copied from a GPU."""
        import numpy as np

        address = ctypes.addressof(tensor)
        size = self._bytes(address)
        if self._is_readable(tensor):
            flat: Any = np.frombuffer((ctypes.c_char * size).from_address(tensor.data), element)
        else:
            flat = np.empty(size // ctypes.sizeof(element), element)
            self._get(address, flat.ctypes.data, 0, size)
        return np.lib.stride_tricks.as_strided(flat, tensor.ne[::-1], tensor.nb[::-1], writeable=False)

    def _is_readable(self, tensor: GgmlTensor) -> bool:
        """Return whether the process can read the data in place."""
        return not tensor.buffer or bool(self._is_host(tensor.buffer))


_FILL = 0x2C  # every byte of a tensor: an ordinary number in all types, because denormals would be slow
_Pointer = ctypes.c_void_p


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", _Pointer), ("no_alloc", ctypes.c_bool))


# Name -> result, arguments; ggml.h and ggml-backend.h.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_Pointer, (_InitParams,)),
    "ggml_free": (None, (_Pointer,)),
    "ggml_row_size": (ctypes.c_size_t, (ctypes.c_int, ctypes.c_int64)),
    "ggml_new_tensor_4d": (_Pointer, (_Pointer, ctypes.c_int, *[ctypes.c_int64] * 4)),
    "ggml_mul_mat": (_Pointer, (_Pointer, _Pointer, _Pointer)),
    "ggml_add": (_Pointer, (_Pointer, _Pointer, _Pointer)),
    "ggml_permute": (_Pointer, (_Pointer, _Pointer, *[ctypes.c_int] * 4)),
    "ggml_flash_attn_ext": (_Pointer, (*[_Pointer] * 5, *[ctypes.c_float] * 3)),
    "ggml_new_graph": (_Pointer, (_Pointer,)),
    "ggml_build_forward_expand": (None, (_Pointer, _Pointer)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_Pointer, (_Pointer, _Pointer)),
    "ggml_backend_buffer_clear": (None, (_Pointer, ctypes.c_uint8)),
    "ggml_backend_buffer_free": (None, (_Pointer,)),
    "ggml_backend_graph_compute": (ctypes.c_int, (_Pointer, _Pointer)),
    "ggml_backend_tensor_get": (None, (_Pointer, _Pointer, ctypes.c_size_t, ctypes.c_size_t)),
    "ggml_backend_dev_by_type": (_Pointer, (ctypes.c_int,)),
    "ggml_backend_dev_type": (ctypes.c_int, (_Pointer,)),
    "ggml_backend_dev_init": (_Pointer, (_Pointer, ctypes.c_char_p)),
    "ggml_backend_dev_buffer_type": (_Pointer, (_Pointer,)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (_Pointer, _Pointer)),
    "ggml_backend_dev_backend_reg": (_Pointer, (_Pointer,)),
    "ggml_backend_reg_get_proc_address": (_Pointer, (_Pointer, ctypes.c_char_p)),
}


class Operations:
    """ggml's operations on one device. Each function above is a method, without "ggml_".

    Args:
        threads: of a processor.
        device: ggml's pointer; 0 is the processor, with the variant in use.
        is_shared: other programs use the processor. seconds() takes processor time of one thread: threads wait for each
            other after each operation, and the one that another program has displaced holds up all.

    Attributes:
        plain: the buffer type that stores matrices unchanged.
        repacking: buffer types that repack some types of matrices when they are loaded.
        is_gpu: the device is a GPU, which computes after the call has returned.
    """

    def __init__(self, threads: int, device: int = 0, *, is_shared: bool = False) -> None:
        self._divisor, threads = (threads, 1) if is_shared else (1, threads)
        self._now = time.thread_time if is_shared else time.perf_counter
        for name, (result, arguments) in _FUNCTIONS.items():
            setattr(self, name.removeprefix("ggml_"), function(name, result, *arguments))
        self._device = device or self.backend_dev_by_type(CPU)
        self._backend = self.backend_dev_init(self._device, None)
        self.plain = self.backend_dev_buffer_type(self._device)
        self.repacking: tuple[int, ...] = ()
        self.is_gpu = self.backend_dev_type(self._device) != CPU
        if self.is_gpu:
            return
        registry = self.backend_dev_backend_reg(self._device)
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, _Pointer, ctypes.c_int)(address)(self._backend, threads)
        self.repacking = tuple(self._extra_buffers(registry))

    def __getattr__(self, name: str) -> Callable[..., Any]:  # set in __init__, one by one
        raise AttributeError(name)

    def _extra_buffers(self, registry: int) -> Iterator[int]:
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(_Pointer), _Pointer)(address)(self._device) if address else None
        index = 0
        while kinds and kinds[index]:
            yield kinds[index]
            index += 1

    def supports(self, result: int) -> bool:
        return bool(self.backend_dev_supports_op(self._device, result))

    @contextlib.contextmanager
    def tensors(self) -> Iterator[int]:
        """Yield a ggml context, which holds descriptions of tensors and graphs."""
        context = self.init(_InitParams(1 << 20, None, True))
        try:
            yield context
        finally:
            self.free(context)

    @contextlib.contextmanager
    def memory(self, context: int, buffer_type: int) -> Iterator[bool]:
        """Allocate and fill memory for the context's tensors without memory; yield False if there is none."""
        buffer = self.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
        if buffer:
            self.backend_buffer_clear(buffer, _FILL)
        try:
            yield bool(buffer)
        finally:
            if buffer:
                self.backend_buffer_free(buffer)

    def tensor(self, context: int, type_number: int, *shape: int) -> int:
        """Describe a tensor, the contiguous dimension first."""
        return int(self.new_tensor_4d(context, type_number, *(*shape, 1, 1, 1)[:4]))

    def seconds(self, result: int, enough: float, repeats: int, waits: float = 0.0) -> float:
        """Compute a tensor and its inputs repeatedly, after one warm-up; return the shortest time.

        Other programs can only make it longer. With is_shared, as long as all threads would take if each did its part.

        Args:
            enough: seconds in total after which it is not repeated.
            waits: seconds that several threads wait for each other in it, which one thread does not.
        """
        with self.tensors() as place:
            graph = self.new_graph(place)
            self.build_forward_expand(graph, result)
            self._compute(graph, result)
            times: list[float] = []
            while len(times) < repeats and sum(times) < enough:
                start = self._now()
                self._compute(graph, result)
                times.append(self._now() - start)
            seconds = max(min(times) - self._round_trip(result), 1e-9)
            return seconds if self._divisor == 1 else seconds / self._divisor + waits

    def _compute(self, graph: int, result: int) -> None:
        self.backend_graph_compute(self._backend, graph)
        if self.is_gpu:  # the call returns when the graph is sent
            self._read(result)

    def _read(self, result: int) -> None:
        self.backend_tensor_get(result, ctypes.create_string_buffer(4), 0, 4)

    def _round_trip(self, result: int) -> float:
        """Return the part of a measurement that is spent on reading the result, in seconds."""
        if not self.is_gpu:
            return 0.0
        times = []
        for _ in range(3):
            start = time.perf_counter()
            self._read(result)
            times.append(time.perf_counter() - start)
        return min(times)

"""Timing of single ggml operations, without a model, on the processor or a GPU.

Owns ggml's contexts, graphs and buffers; must not know which operations are measured, or why.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

from llmrun.engine.llama.devices import CPU
from llmrun.engine.llama.library import function

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
    "ggml_backend_dev_init": (_Pointer, (_Pointer, ctypes.c_char_p)),
    "ggml_backend_dev_buffer_type": (_Pointer, (_Pointer,)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (_Pointer, _Pointer)),
    "ggml_backend_dev_backend_reg": (_Pointer, (_Pointer,)),
    "ggml_backend_reg_get_proc_address": (_Pointer, (_Pointer, ctypes.c_char_p)),
}


class Operations:
    """ggml's operations on one device. Each function above is a method, without "ggml_".

    Args:
        gpu: ggml's pointer to a GPU; 0 is the processor.

    Attributes:
        plain: the buffer type that stores matrices unchanged.
        repacking: buffer types that repack some types of matrices when they are loaded.
        is_gpu: the device is a GPU, which computes after the call has returned.
    """

    def __init__(self, threads: int, gpu: int = 0) -> None:
        for name, (result, arguments) in _FUNCTIONS.items():
            setattr(self, name.removeprefix("ggml_"), function(name, result, *arguments))
        self._device = gpu or self.backend_dev_by_type(CPU)
        self._backend = self.backend_dev_init(self._device, None)
        self.plain = self.backend_dev_buffer_type(self._device)
        self.repacking: tuple[int, ...] = ()
        self.is_gpu = bool(gpu)
        if gpu:
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
    def memory(self, context: int, kind: int) -> Iterator[bool]:
        """Allocate and fill memory for the context's tensors without memory; yield False if there is none."""
        buffer = self.backend_alloc_ctx_tensors_from_buft(context, kind)
        if buffer:
            self.backend_buffer_clear(buffer, _FILL)
        try:
            yield bool(buffer)
        finally:
            if buffer:
                self.backend_buffer_free(buffer)

    def tensor(self, context: int, kind: int, *shape: int) -> int:
        """Describe a tensor, the contiguous dimension first."""
        return int(self.new_tensor_4d(context, kind, *(*shape, 1, 1, 1)[:4]))

    def seconds(self, result: int, enough: float, repeats: int) -> float:
        """Compute a tensor and its inputs repeatedly, after one warm-up; return the shortest time.

        Other programs can only make it longer.

        Args:
            enough: seconds in total after which it is not repeated.
        """
        with self.tensors() as place:
            graph = self.new_graph(place)
            self.build_forward_expand(graph, result)
            self._compute(graph, result)
            times: list[float] = []
            while len(times) < repeats and sum(times) < enough:
                start = time.perf_counter()
                self._compute(graph, result)
                times.append(time.perf_counter() - start)
            return max(min(times) - self._round_trip(result), 1e-9)

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

"""How fast ggml computes here what a model is made of: matrices of each type, attention, small operations.

Owns the measuring, with ggml's own kernels on the threads that a model would get: what a processor's data sheet
promises says little about the kernel that a type really runs on. Must not know models or what is made of the figures.
main() takes THREADS CACHE TYPE... and prints them as one line of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20, "IQ3_S": 21,
    "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29, "BF16": 30, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39,
}  # fmt: skip
"""ggml's numbers of the types that weights have."""

HEAD_LENGTHS = (64, 96, 128, 256)
"""Head lengths whose attention is measured; kernels prefer some by far."""

_COLUMNS = 2048  # of a matrix: the width of a small model
_LARGE = (64 << 20, 384 << 20)  # bytes of a matrix for decode, at least and at most
_CACHES = 1.5  # a matrix for decode is as large as so many last-level caches, so that it comes from memory
_SMALL = 2 << 20  # bytes of a matrix for prefill, which computes more than it reads
_PROMPT = 128  # tokens of a prefill
_POSITIONS = 1024  # that attention looks back at: few enough for a cache, since reading them is reckoned apart
_HEADS = 16
_KV_HEADS = 4
_OPERATIONS = 300
_FILL = 0x2C  # as every byte of a matrix: an ordinary number in all types, so that no denormal slows anything
_SECONDS = 0.02  # after that a measurement is not repeated ...
_REPEATS = 2  # ... nor more often than that; the first turn only warms up
_INTEGRATED = 2  # GGML_BACKEND_DEVICE_TYPE_IGPU
_GPU_KINDS = (1, _INTEGRATED)

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
    "ggml_backend_dev_by_type": (_Pointer, (ctypes.c_int,)),
    "ggml_backend_dev_count": (ctypes.c_size_t, ()),
    "ggml_backend_dev_get": (_Pointer, (ctypes.c_size_t,)),
    "ggml_backend_dev_name": (ctypes.c_char_p, (_Pointer,)),
    "ggml_backend_dev_description": (ctypes.c_char_p, (_Pointer,)),
    "ggml_backend_dev_type": (ctypes.c_int, (_Pointer,)),
    "ggml_backend_dev_memory": (None, (_Pointer, *[ctypes.POINTER(ctypes.c_size_t)] * 2)),
    "ggml_backend_dev_init": (_Pointer, (_Pointer, ctypes.c_char_p)),
    "ggml_backend_dev_buffer_type": (_Pointer, (_Pointer,)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (_Pointer, _Pointer)),
    "ggml_backend_dev_backend_reg": (_Pointer, (_Pointer,)),
    "ggml_backend_reg_get_proc_address": (_Pointer, (_Pointer, ctypes.c_char_p)),
}


class Ggml:
    """ggml's operations on the processor.

    Args:
        library: the loaded llama.cpp.
        threads: that compute.
        cache: bytes of the last-level cache; 0 when that isn't known.

    Attributes:
        sizes: of matrices for decode, in bytes: two where a cache is so large that it may hold a small model.
    """

    def __init__(self, library: Any, threads: int, cache: int = 0) -> None:
        large = min(max(int(_CACHES * cache), _LARGE[0]), _LARGE[1])
        self.sizes = sorted({_LARGE[0], large})
        for name, (result, arguments) in _FUNCTIONS.items():
            function = library[name]
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.device = self.backend_dev_by_type(0)  # GGML_BACKEND_DEVICE_TYPE_CPU
        self.backend = self.backend_dev_init(self.device, None)
        registry = self.backend_dev_backend_reg(self.device)
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, _Pointer, ctypes.c_int)(address)(self.backend, threads)
        self.plain = self.backend_dev_buffer_type(self.device)
        self.repacking = tuple(self._extra_buffers(registry))

    def __getattr__(self, name: str) -> Callable[..., Any]:  # set in __init__, one by one
        raise AttributeError(name)

    def _extra_buffers(self, registry: int) -> Iterator[int]:
        """Kinds of buffers that reorder some types of matrices when they are loaded."""
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(_Pointer), _Pointer)(address)(self.device) if address else None
        index = 0
        while kinds and kinds[index]:
            yield kinds[index]
            index += 1

    def gpus(self) -> Iterator[dict[str, Any]]:
        """Name, description, memory in bytes, and whether that is the machine's own, of every GPU."""
        for index in range(self.backend_dev_count()):
            device = self.backend_dev_get(index)
            kind = self.backend_dev_type(device)
            if kind not in _GPU_KINDS:
                continue
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            self.backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            yield {
                "name": self.backend_dev_name(device).decode(errors="replace"),
                "description": self.backend_dev_description(device).decode(errors="replace"),
                "memory_total": total.value,
                "memory_free": free.value,
                "shared": kind == _INTEGRATED,
            }

    @contextlib.contextmanager
    def tensors(self) -> Iterator[int]:
        """A ggml context, which holds descriptions of tensors and graphs."""
        context = self.init(_InitParams(1 << 20, None, True))
        try:
            yield context
        finally:
            self.free(context)

    @contextlib.contextmanager
    def memory(self, context: int, kind: int) -> Iterator[bool]:
        """Memory for the context's tensors that have none yet, filled; whether there was some."""
        buffer = self.backend_alloc_ctx_tensors_from_buft(context, kind)
        if buffer:
            self.backend_buffer_clear(buffer, _FILL)
        try:
            yield bool(buffer)
        finally:
            if buffer:
                self.backend_buffer_free(buffer)

    def tensor(self, context: int, kind: int, *shape: int) -> int:
        """Description of a tensor, the contiguous dimension first."""
        return int(self.new_tensor_4d(context, kind, *(*shape, 1, 1, 1)[:4]))

    def seconds(self, result: int) -> float:
        """To compute a tensor and what it depends on: the quickest of some times."""
        with self.tensors() as place:
            graph = self.new_graph(place)
            self.build_forward_expand(graph, result)
            self.backend_graph_compute(self.backend, graph)
            best, began = float("inf"), time.perf_counter()
            for _ in range(_REPEATS):
                start = time.perf_counter()
                self.backend_graph_compute(self.backend, graph)
                now = time.perf_counter()
                best = min(best, now - start)
                if now - began > _SECONDS:
                    break
        return best


def measure(ggml: Ggml, types: Sequence[str]) -> dict[str, Any]:
    """Figures of these types, and those that every model needs.

    Returns:
        read: bytes/s that all threads read from memory.
        operation: seconds of a small operation, mostly for the threads to meet.
        attention: KV type -> head length -> seconds for one query head to look at one position that is in a cache.
        attention_prefill: the same in prefill, where many tokens look at the same positions.
        types: type -> decode, size of a matrix in bytes -> bytes/s of it times one token; prefill, multiply-adds/s of
            a matrix times many.
        gpus: name, description, memory_total and memory_free in bytes, and whether that is the machine's own memory.
    """
    return {
        "read": _matrix(ggml, TYPES["F32"], ggml.plain, ggml.sizes[-1], 1),
        "operation": _operation(ggml),
        "attention": {name: _attention(ggml, TYPES[name], 1) for name in ("F16", "Q8_0")},
        "attention_prefill": {name: _attention(ggml, TYPES[name], _PROMPT) for name in ("F16", "Q8_0")},
        "types": {name: _type(ggml, TYPES[name]) for name in types if name in TYPES},
        "gpus": list(ggml.gpus()),
    }


def _type(ggml: Ggml, kind: int) -> dict[str, Any]:
    for buffer in (*ggml.repacking, ggml.plain):
        decode = {size: _matrix(ggml, kind, buffer, size, 1) for size in ggml.sizes}
        if all(decode.values()):
            bytes_a_weight = ggml.row_size(kind, _COLUMNS) / _COLUMNS
            prefill = _matrix(ggml, kind, buffer, _SMALL, _PROMPT) * _PROMPT / bytes_a_weight
            return {"decode": decode, "prefill": prefill}
    return {}


def _matrix(ggml: Ggml, kind: int, buffer: int, n_bytes: int, tokens: int) -> float:
    """Bytes/s of a matrix of about that size times so many tokens; 0 where the buffer is not made for its type."""
    row = ggml.row_size(kind, _COLUMNS)
    rows = n_bytes // row // 256 * 256
    with ggml.tensors() as weights, ggml.tensors() as values:
        matrix = ggml.tensor(weights, kind, _COLUMNS, rows)
        result = ggml.mul_mat(values, matrix, ggml.tensor(values, TYPES["F32"], _COLUMNS, tokens))
        with ggml.memory(weights, buffer) as there:
            if not there or not ggml.backend_dev_supports_op(ggml.device, result):
                return 0.0
            with ggml.memory(values, ggml.plain):
                return float(rows * row / ggml.seconds(result))


def _attention(ggml: Ggml, kind: int, tokens: int) -> dict[int, float]:
    found = {}
    for length in HEAD_LENGTHS:
        with ggml.tensors() as context:
            query = ggml.tensor(context, TYPES["F32"], length, tokens, _HEADS)
            # As in llama.cpp's cache: all heads of a position, then the next position.
            cells = (ggml.tensor(context, kind, length, _KV_HEADS, _POSITIONS) for _ in range(2))
            keys, values = (ggml.permute(context, cell, 0, 2, 1, 3) for cell in cells)
            mask = ggml.tensor(context, TYPES["F16"], _POSITIONS, tokens)
            result = ggml.flash_attn_ext(context, query, keys, values, mask, 1.0, 0.0, 0.0)
            with ggml.memory(context, ggml.plain):
                found[length] = ggml.seconds(result) / (_HEADS * _POSITIONS * tokens)
    return found


def _operation(ggml: Ggml) -> float:
    with ggml.tensors() as context:
        result = first = ggml.tensor(context, TYPES["F32"], _COLUMNS)
        for _ in range(_OPERATIONS):
            result = ggml.add(context, result, first)
        with ggml.memory(context, ggml.plain):
            return ggml.seconds(result) / _OPERATIONS


def _keep_memory() -> None:
    """Let glibc keep freed memory: the system takes longer to give the same pages again than a measurement."""
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            library.mallopt(option, 2 * _LARGE[1])


def start_llama() -> Any:
    """llama.cpp, loaded as the engine loads it."""
    from llmrun.engine.environment import set_environment
    from llmrun.engine.llama.library import import_llama

    set_environment()
    llama = import_llama()
    llama.llama_backend_init()
    return llama


def main() -> None:
    """Measure and print. Arguments: threads, bytes of the last-level cache, then types."""
    result = os.dup(1)
    os.dup2(2, 1)  # what the library prints goes to stderr
    _keep_memory()
    threads, cache, *types = sys.argv[1:]
    figures = measure(Ggml(start_llama()._lib, int(threads), int(cache)), types)
    os.write(result, json.dumps(figures).encode())

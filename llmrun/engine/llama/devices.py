"""ggml's devices in this process, and the description of its build. Must not know models."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING, NamedTuple

from llmrun.engine.llama.library import function, import_llama

if TYPE_CHECKING:
    from llmrun.protocol.devices import Gpu

CPU, _GPU, _INTEGRATED, _ACCELERATOR = 0, 1, 2, 3  # enum ggml_backend_dev_type


class Device(NamedTuple):
    """A processor or a GPU."""

    name: str  # ggml's, e.g. "CUDA0"
    description: str  # e.g. the processor's model name
    kind: int  # enum ggml_backend_dev_type
    pointer: int  # ggml_backend_dev_t

    @property
    def is_processor(self) -> bool:
        return self.kind in (CPU, _ACCELERATOR)


def devices() -> tuple[Device, ...]:
    """Return all of ggml's devices, e.g. "CUDA0" and "CPU"."""
    get = function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    name = function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    description = function("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    kind = function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    pointers = [get(index) for index in range(function("ggml_backend_dev_count", ctypes.c_size_t)())]
    return tuple(Device(_text(name(p)), _text(description(p)), kind(p), p) for p in pointers)


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """Return every GPU with its memory at the first call: before this process has loaded weights."""
    return tuple(memory_of(device) for device in devices() if device.kind in (_GPU, _INTEGRATED))


def memory_of(device: Device) -> Gpu:
    """Return a device with its present memory."""
    from llmrun.protocol.devices import Gpu

    size = ctypes.POINTER(ctypes.c_size_t)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    get = function("ggml_backend_dev_memory", None, ctypes.c_void_p, size, size)
    get(device.pointer, ctypes.byref(free), ctypes.byref(total))
    # A Mac's GPU has the machine's memory, though ggml does not call it integrated.
    shared = device.kind == _INTEGRATED or sys.platform == "darwin"
    return Gpu(device.name, device.description, total.value, free.value, shared)


def backends() -> list[str]:
    """Return the names of ggml's backends, e.g. "CPU" and "CUDA"."""
    get = function("ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t)
    name = function("ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
    return [_text(name(get(index))) for index in range(function("ggml_backend_reg_count", ctypes.c_size_t)())]


def build() -> tuple[str, str]:
    """Return ggml's commit and version."""
    commit, version = (function(f"ggml_{name}", ctypes.c_char_p)() for name in ("commit", "version"))
    return _text(commit), _text(version)


def features() -> str:
    """Return the backends' build features: "CPU : AVX2 = 1 | FMA = 1 | CUDA : ARCHS = 500 | "."""
    return _text(import_llama().llama_print_system_info())


def supports_offload() -> bool:
    return bool(import_llama().llama_supports_gpu_offload())


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")

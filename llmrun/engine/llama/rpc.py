"""ggml's RPC: devices of other machines beside our own, and our own for other machines.

Owns every call of that backend; must not know models. ggml aborts the process where a worker does not do what it
expects: the front has asked each one before (runner/workers.py), and explains such a death.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

from llmrun.engine.llama.devices import Device, devices
from llmrun.engine.llama.library import VERSION, function
from llmrun.errors import UsageError

_APART = "GGML_BACKEND_PATH"  # ggml's own variable for a backend that was built apart from the library
_added: set[str] = set()


def is_built() -> bool:
    """Whether this build has it."""
    return bool(_backend())


@functools.cache
def _backend() -> int:
    """0 where there is none."""
    found = function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC")
    if not found and _APART in os.environ:
        found = function("ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)(os.fsencode(os.environ[_APART]))
    return int(found or 0)


def require_build() -> None:
    """Raises UsageError where this build can't."""
    if not is_built():
        rebuild = "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python"
        raise UsageError(
            "this machine's llama.cpp was built without RPC",
            hint=f'CMAKE_ARGS="-DGGML_RPC=ON" {rebuild} llama-cpp-python=={VERSION}',
        )


def _of_backend(name: str, result: Any, *arguments: Any) -> Any:
    require_build()
    find = function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(result, *arguments)(find(_backend(), name.encode()))


def add_workers(endpoints: Sequence[str]) -> None:
    """Let llama.cpp see the devices of workers, in this order, before a model is loaded.

    Raises:
        UsageError: this build can't.
    """
    add = _of_backend("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    register = function("ggml_backend_register", None, ctypes.c_void_p)
    for endpoint in endpoints:
        if endpoint not in _added:
            register(add(endpoint.encode()))
            _added.add(endpoint)


def worker_device(endpoint: str, index: int) -> int:
    """ggml's pointer to one of a worker's devices, which is added.

    Raises:
        UsageError: this build can't.
    """
    add_workers((endpoint,))
    return [each.pointer for each in devices() if each.description == endpoint][index]


def served() -> tuple[Device, ...]:
    """What a worker serves: the GPUs, or the processor where there are none."""
    return tuple(each for each in devices() if not each.is_processor) or devices()[:1]


def serve(endpoint: str, threads: int, cache: str, chosen: Sequence[Device]) -> None:
    """Compute for one engine after the other; comes back only where it can't listen.

    Args:
        endpoint: "ADDRESS:PORT", an IPv4 address.
        cache: folder that keeps large tensors, "" for none.
    """
    begin = _of_backend(
        "ggml_backend_rpc_start_server",
        None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p),
    )  # fmt: skip
    pointers = (ctypes.c_void_p * len(chosen))(*(device.pointer for device in chosen))
    begin(endpoint.encode(), os.fsencode(cache) if cache else None, threads, len(chosen), pointers)

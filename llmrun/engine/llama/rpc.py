"""ggml's RPC backend: use other machines' devices, and serve this machine's.

Owns every call of that backend; must not know models. ggml aborts the process if a worker breaks the protocol: the
front checks each worker before (runner/workers.py), and explains such a crash.
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
from llmrun.protocol.llama_folder import INSTALLED, is_bundled

_BACKEND_PATH = "GGML_BACKEND_PATH"  # ggml's own variable for a backend that was built separately
_added: set[str] = set()


def is_built() -> bool:
    return bool(_backend())


@functools.cache
def _backend() -> int:
    """Return ggml's pointer to the backend, 0 without one."""
    found = function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC")
    if not found and _BACKEND_PATH in os.environ:
        path = os.fsencode(os.environ[_BACKEND_PATH])
        found = function("ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)(path)
    return int(found or 0)


def require_build() -> None:
    """Raise UsageError if this build has no RPC."""
    if not is_built():
        rebuild = "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python"
        chooses = f", then export LLMRUN_LLAMA={INSTALLED}" if is_bundled() else ""
        raise UsageError(
            "this machine's llama.cpp was built without RPC",
            hint=f'CMAKE_ARGS="-DGGML_RPC=ON" {rebuild} llama-cpp-python=={VERSION}{chooses}',
        )


def _function(name: str, result: Any, *arguments: Any) -> Any:
    require_build()
    find = function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(result, *arguments)(find(_backend(), name.encode()))


def add_workers(endpoints: Sequence[str]) -> None:
    """Register the devices of workers with llama.cpp, in this order, before a model is loaded.

    Raises:
        UsageError: this build has no RPC.
    """
    add = _function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    register = function("ggml_backend_register", None, ctypes.c_void_p)
    for endpoint in endpoints:
        if endpoint not in _added:
            register(add(endpoint.encode()))
            _added.add(endpoint)


def served() -> tuple[Device, ...]:
    """Return the devices that a worker serves: the GPUs, or the processor if there are none."""
    return tuple(each for each in devices() if not each.is_processor) or devices()[:1]


def serve(endpoint: str, threads: int, cache: str, chosen: Sequence[Device]) -> None:
    """Serve one engine after another; return only if listening fails.

    Args:
        endpoint: "ADDRESS:PORT", an IPv4 address.
        cache: folder that caches large tensors, "" for none.
    """
    begin = _function(
        "ggml_backend_rpc_start_server",
        None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p),
    )  # fmt: skip
    pointers = (ctypes.c_void_p * len(chosen))(*(device.pointer for device in chosen))
    begin(endpoint.encode(), os.fsencode(cache) if cache else None, threads, len(chosen), pointers)

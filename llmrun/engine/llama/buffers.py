"""Sizes of the buffers that llama.cpp allocates on each device, read from its log; its C API does not tell them.

Must not know plans.
"""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING, Any

from llmrun import _native
from llmrun.engine.llama.devices import gpus

if TYPE_CHECKING:  # loading the weights does not wait for this import
    from llmrun.protocol.loading import DeviceBuffer

_SIZE = re.compile(r"(\S+) +(\w+)(?: state)? buffer size = +([\d.]+) MiB")
_WEIGHTS = "model"
_FAILURE = re.compile(r"failed to allocate (\S+) buffer of size (\d+)")
_MIB = 1 << 20
_installed: list[Any] = []  # the callback that llama.cpp has now


class BufferLog:
    """llama.cpp's log on its way to the native filter."""

    def __init__(self) -> None:
        self.failed: DeviceBuffer | None = None
        """The buffer that the last context failed to allocate."""
        self._sizes: dict[tuple[str, str], int] = {}  # device, purpose -> bytes
        self._forward = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            _native.log_callback_address
        )

    def install(self, llama: Any, *, verbose: bool) -> None:
        """Make llama.cpp log here; without GPUs directly to the filter, because a callback in Python slows starts."""
        receiver = self.add if gpus() else _native.log_callback_address
        callback = llama.llama_log_callback(receiver)
        llama.llama_log_set(callback, ctypes.c_void_p(int(verbose)))
        _installed[:] = [callback]  # lives as long as llama.cpp may log, longer than this model

    def add(self, level: int, text: bytes, verbose: Any) -> None:
        if b"buffer" in text:
            self.read(text.decode("utf-8", "replace"))
        self._forward(level, text, verbose)

    def read(self, line: str) -> None:
        if found := _SIZE.search(line):
            device, purpose, size = found.groups()
            key = device.removesuffix("_Mapped"), purpose
            self._sizes[key] = self._sizes.get(key, 0) + round(float(size) * _MIB)
        elif found := _FAILURE.search(line):
            from llmrun.protocol.loading import DeviceBuffer

            self.failed = DeviceBuffer(found[1], int(found[2]))

    def begin_context(self, llama: Any, *, verbose: bool) -> None:
        """Forget all buffers but the weights', and receive the log again: another model may have taken it."""
        self.install(llama, verbose=verbose)
        self.failed = None
        self._sizes = {key: size for key, size in self._sizes.items() if key[1] == _WEIGHTS}

    @property
    def buffers(self) -> tuple[DeviceBuffer, ...]:
        """The bytes of each device, or of host memory such as "CPU" and "CUDA_Host"."""
        from llmrun.protocol.loading import DeviceBuffer

        devices = dict.fromkeys(device for device, _ in self._sizes)
        return tuple(
            DeviceBuffer(device, sum(size for (each, _), size in self._sizes.items() if each == device))
            for device in devices
        )

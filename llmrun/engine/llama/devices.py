"""ggml's devices: those of this process, the choice among them for a model, and other machines' over its RPC backend.

ggml aborts the process if an RPC worker breaks the protocol: the front checks each worker before (runner/workers.py),
and explains such a crash.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun.engine.llama.library import VERSION, function, import_llama
from llmrun.errors import UsageError
from llmrun.protocol.devices import (
    NO_DEVICE,
    PROCESSOR,
    SPLIT_MODES,
    Gpu,
    TensorOverride,
    device_names,
    proportions,
    tensor_overrides,
    unknown_device,
)
from llmrun.protocol.llama_folder import INSTALLED, is_bundled
from llmrun.protocol.settings import DEVICE_SETTINGS, SETTINGS, EngineSettings

if TYPE_CHECKING:  # loading the weights does not wait for these imports
    from pathlib import Path

    from llmrun.gguf.header import Header
    from llmrun.protocol.loading import DeviceBuffer


CPU, _GPU, _INTEGRATED, _ACCELERATOR = 0, 1, 2, 3  # enum ggml_backend_dev_type
_BACKEND_PATH = "GGML_BACKEND_PATH"  # ggml's own variable for a backend that was built separately
_added: set[str] = set()  # endpoints of workers


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
    type_of = function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    pointers = [get(index) for index in range(function("ggml_backend_dev_count", ctypes.c_size_t)())]
    return tuple(Device(_text(name(p)), _text(description(p)), type_of(p), p) for p in pointers)


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """Return every GPU with its memory at the first call: before this process has loaded weights."""
    return tuple(memory_of(device) for device in devices() if device.kind in (_GPU, _INTEGRATED))


def memory_of(device: Device) -> Gpu:
    """Return a device with its present memory."""
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


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override: the buffer type of tensors whose names match; an empty one ends a list."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class DeviceParameters:
    """The device settings of a load, as ctypes that live as long as the load.

    Args:
        experts: pattern of the names of experts that stay in RAM, "" for none.
        layer_counts: as in Load.
    """

    def __init__(self, settings: EngineSettings, experts: str, layer_counts: tuple[int, ...]) -> None:
        self._settings = settings
        overrides = tensor_overrides(settings.override_tensor)
        self._overrides = (*overrides, *([TensorOverride(experts, PROCESSOR)] if experts else []))
        self._shares = layer_counts or proportions(settings.tensor_split)
        self._arrays: list[Any] = []
        self._parts: dict[str, float] = {}  # device -> share of each tensor

    @property
    def moves_tensors(self) -> bool:
        return bool(self._overrides)

    def are_of(self, load: EngineSettings) -> bool:
        """Return whether another load has the same settings."""
        return all(getattr(self._settings, name) == getattr(load, name) for name in DEVICE_SETTINGS)

    def apply(self, llama: Any, params: Any, path: Path) -> None:
        """Set the fields of llama_model_params.

        Args:
            path: of the model's file.

        Raises:
            UsageError: a device does not exist, or the model can't be split like this.
        """
        settings, by_name = self._settings, {device.name: device for device in devices()}
        params.split_mode, params.main_gpu = SPLIT_MODES.index(settings.split_mode), settings.main_gpu
        names = device_names(settings.device)
        if names:
            wanted = [] if names == (NO_DEVICE,) else [_device("device", by_name, name).pointer for name in names]
            params.devices = self._array(ctypes.c_void_p, [*wanted, None])
        used = [by_name[name] for name in names or by_name if name in by_name and not by_name[name].is_processor]
        if settings.split_mode == "row":
            _check_rows(used)
        if settings.split_mode == "tensor" and used:
            self._parts = dict(zip((device.name for device in used), self._shares or [1.0] * len(used), strict=False))
            from llmrun.gguf.reader import read_header

            _check_heads(read_header(path), [*self._parts.values()])
        if self._shares:
            shares = (ctypes.c_float * llama.llama_max_devices())(*self._shares)
            self._arrays.append(shares)
            params.tensor_split = shares
        if self._overrides:
            buffer_type = function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
            overrides = [
                _Override(rule.pattern.encode(), buffer_type(_device("override_tensor", by_name, rule.device).pointer))
                for rule in self._overrides
            ]
            params.tensor_buft_overrides = self._array(_Override, [*overrides, _Override()])

    def by_device(self, buffers: Sequence[DeviceBuffer]) -> tuple[DeviceBuffer, ...]:
        """Return buffers with those of llama.cpp's Meta device, which are as large as the largest part, by device."""
        from llmrun.protocol.loading import DeviceBuffer

        most, by_device = max(self._parts.values(), default=1), []
        for buffer in buffers:
            is_meta = buffer.device.startswith("Meta(")
            parts = self._parts if is_meta else {buffer.device: most}
            by_device += [DeviceBuffer(name, int(buffer.n_bytes * part / most)) for name, part in parts.items()]
        return tuple(by_device)

    def _array(self, element: Any, values: list[Any]) -> int:
        """Return the address of an array."""
        self._arrays.append((element * len(values))(*values))
        return ctypes.addressof(self._arrays[-1])


def _device(setting: str, by_name: dict[str, Device], name: str) -> Device:
    if name not in by_name:
        raise unknown_device(SETTINGS[setting].option, name, tuple(by_name))
    return by_name[name]


def _check_heads(header: Header, parts: Sequence[float]) -> None:
    """Raise UsageError if a GPU would get a part of a head.

    llama.cpp 0.3.36 then computes other text, or writes beyond its memory.
    """
    for heads in {header.kv_heads_of(layer) for layer in range(header.n_layers)}:
        if any(heads * part % sum(parts) for part in parts):
            shares = "/".join(f"{part:g}" for part in parts)
            why = f"each GPU needs whole KV heads, and {shares} does not divide the model's {heads}"
            hint = "--split-mode layer, or another --tensor-split"
            raise UsageError("--split-mode tensor can't split this model", why=why, hint=hint)


def _check_rows(chosen: Sequence[Device]) -> None:
    """Raise UsageError if a GPU can't split rows, which few backends can: llama.cpp would not load the model."""
    registry = function("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)
    find = function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    for device in chosen:
        if not find(registry(device.pointer), b"ggml_backend_split_buffer_type"):
            why = f"llama.cpp has no split buffers for {device.name}"
            raise UsageError("--split-mode row can't be used here", why=why, hint="--split-mode tensor, or layer")


def has_rpc() -> bool:
    """Return whether this build has the RPC backend."""
    return bool(_rpc_backend())


@functools.cache
def _rpc_backend() -> int:
    """Return ggml's pointer to the RPC backend, 0 without one."""
    backend = function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC")
    if not backend and _BACKEND_PATH in os.environ:
        path = os.fsencode(os.environ[_BACKEND_PATH])
        backend = function("ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)(path)
    return int(backend or 0)


def require_rpc() -> None:
    """Raise UsageError if this build has no RPC."""
    if not has_rpc():
        rebuild = "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python"
        chooses = f", then export LLMRUN_LLAMA={INSTALLED}" if is_bundled() else ""
        raise UsageError(
            "this machine's llama.cpp was built without RPC",
            hint=f'CMAKE_ARGS="-DGGML_RPC=ON" {rebuild} llama-cpp-python=={VERSION}{chooses}',
        )


def _rpc_function(name: str, result: Any, *arguments: Any) -> Any:
    require_rpc()
    find = function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(result, *arguments)(find(_rpc_backend(), name.encode()))


def add_workers(endpoints: Sequence[str]) -> None:
    """Register the devices of workers with llama.cpp, in this order, before a model is loaded.

    Raises:
        UsageError: this build has no RPC.
    """
    add = _rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    register = function("ggml_backend_register", None, ctypes.c_void_p)
    for endpoint in endpoints:
        if endpoint not in _added:
            register(add(endpoint.encode()))
            _added.add(endpoint)


def served() -> tuple[Device, ...]:
    """Return the devices that a worker serves: the GPUs, or the processor if there are none."""
    return tuple(device for device in devices() if not device.is_processor) or devices()[:1]


def serve(endpoint: str, threads: int, cache: str, chosen: Sequence[Device]) -> None:
    """Serve one engine after another; return only if listening fails.

    Args:
        endpoint: "ADDRESS:PORT", an IPv4 address.
        cache: folder that caches large tensors, "" for none.
    """
    begin = _rpc_function(
        "ggml_backend_rpc_start_server",
        None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p),
    )  # fmt: skip
    pointers = (ctypes.c_void_p * len(chosen))(*(device.pointer for device in chosen))
    begin(endpoint.encode(), os.fsencode(cache) if cache else None, threads, len(chosen), pointers)

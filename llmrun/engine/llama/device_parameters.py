"""The parameters of llama.cpp's model loading that choose devices. Must not know plans."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmrun.engine.llama.devices import Device, devices
from llmrun.engine.llama.library import function
from llmrun.errors import UsageError
from llmrun.protocol.devices import (
    NO_DEVICE,
    PROCESSOR,
    SPLIT_MODES,
    TensorOverride,
    device_names,
    proportions,
    tensor_overrides,
    unknown_device,
)
from llmrun.protocol.settings import DEVICE_SETTINGS, SETTINGS, EngineSettings

if TYPE_CHECKING:  # loading the weights does not wait for these imports
    from pathlib import Path

    from llmrun.gguf.header import Header
    from llmrun.protocol.loading import DeviceBuffer


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
        settings, known = self._settings, {each.name: each for each in devices()}
        params.split_mode, params.main_gpu = SPLIT_MODES.index(settings.split_mode), settings.main_gpu
        names = device_names(settings.device)
        if names:
            wanted = [] if names == (NO_DEVICE,) else [_device("device", known, name).pointer for name in names]
            params.devices = self._array(ctypes.c_void_p, [*wanted, None])
        used = [known[name] for name in names or known if name in known and not known[name].is_processor]
        if settings.split_mode == "row":
            _check_rows(used)
        if settings.split_mode == "tensor" and used:
            self._parts = dict(zip((each.name for each in used), self._shares or [1.0] * len(used), strict=False))
            from llmrun.gguf.reader import read_header

            _check_heads(read_header(path), [*self._parts.values()])
        if self._shares:
            shares = (ctypes.c_float * llama.llama_max_devices())(*self._shares)
            self._arrays.append(shares)
            params.tensor_split = shares
        if self._overrides:
            buffer_type = function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
            found = [
                _Override(each.pattern.encode(), buffer_type(_device("override_tensor", known, each.device).pointer))
                for each in self._overrides
            ]
            params.tensor_buft_overrides = self._array(_Override, [*found, _Override()])

    def by_device(self, buffers: Sequence[DeviceBuffer]) -> tuple[DeviceBuffer, ...]:
        """Return buffers with those of llama.cpp's Meta device, which are as large as the largest part, by device."""
        from llmrun.protocol.loading import DeviceBuffer

        most, found = max(self._parts.values(), default=1), []
        for buffer in buffers:
            is_meta = buffer.device.startswith("Meta(")
            parts = self._parts if is_meta else {buffer.device: most}
            found += [DeviceBuffer(name, int(buffer.n_bytes * part / most)) for name, part in parts.items()]
        return tuple(found)

    def _array(self, kind: Any, values: list[Any]) -> int:
        """Return the address of an array."""
        self._arrays.append((kind * len(values))(*values))
        return ctypes.addressof(self._arrays[-1])


def _device(setting: str, known: dict[str, Device], name: str) -> Device:
    if name not in known:
        raise unknown_device(SETTINGS[setting].option, name, tuple(known))
    return known[name]


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

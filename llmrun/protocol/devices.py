"""A device, as the engine reports it to the front, and the texts that choose devices.

Must not know models, or where planning places them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmrun.errors import UsageError

SPLIT_MODES = ("none", "layer", "row", "tensor")
"""The divisions of a model between GPUs, numbered as llama.cpp's enum llama_split_mode."""
NO_DEVICE = "none"
PROCESSOR = "CPU"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device besides the CPU that ggml can compute on."""

    name: str  # ggml's, e.g. "CUDA0"
    description: str  # e.g. "NVIDIA GeForce RTX 3060"
    memory_total: int  # bytes
    memory_free: int  # bytes
    shared: bool = False  # its memory is the machine's RAM, as with integrated graphics


class TensorOverride(NamedTuple):
    """A device for the tensors whose names a regular expression matches."""

    pattern: str
    device: str  # ggml's name


def proportions(text: str) -> tuple[float, ...]:
    """Parse the proportions of several GPUs, e.g. "3/1" or "3,1"; () for "".

    Raises:
        UsageError: the text is invalid.
    """
    parts = _parts(text)
    if not all(re.fullmatch(r"\d{1,9}(\.\d{1,9})?", part) for part in parts) or (parts and not any(map(float, parts))):
        why = "must be a number for each GPU, one of them larger than 0"
        raise UsageError(f"invalid --tensor-split {text}", why=why, hint="--tensor-split 3/1")
    return tuple(map(float, parts))


def device_names(text: str) -> tuple[str, ...]:
    """Parse the names of GPUs, e.g. "CUDA0/CUDA1"; ("none",) for no GPU, () for all."""
    return tuple(dict.fromkeys(_parts(text)))


def tensor_overrides(text: str) -> tuple[TensorOverride, ...]:
    """Parse e.g. "ffn_up=CPU;ffn_down=CUDA1".

    Raises:
        UsageError: the text is invalid.
    """
    found = []
    for part in _parts(text, ",;"):
        pattern, equals, device = part.rpartition("=")
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"invalid --override-tensor {part}", why=f"{pattern} is not a pattern: {error}") from None
        if not pattern or not equals or not device:
            why = "must be a pattern of tensors' names, =, and the name of a device"
            raise UsageError(f"invalid --override-tensor {part}", why=why, hint="--override-tensor 'ffn_up=CPU'")
        found.append(TensorOverride(pattern, device))
    return tuple(found)


def check_overrides(text: str, gpus: Sequence[Gpu]) -> None:
    """Raise UsageError if a tensor override names a device that the model does not use."""
    devices = [PROCESSOR, *(gpu.name for gpu in gpus)]
    for override in tensor_overrides(text):
        if override.device not in devices:
            raise unknown_device("--override-tensor", override.device, devices)


def _parts(text: str, separators: str = ",/") -> list[str]:
    return [part.strip() for part in re.split(f"[{separators}]", text) if part.strip()]


def selected(
    gpus: Sequence[Gpu], device: str = "", split_mode: str = "layer", main_gpu: int = 0, tensor_split: str = ""
) -> tuple[Gpu, ...]:
    """Return the GPUs that llama.cpp uses with these settings, in its order.

    Args:
        gpus: all GPUs of the machine.

    Raises:
        UsageError: one of the settings names a GPU that does not exist.
    """
    names, known = device_names(device), {gpu.name: gpu for gpu in gpus}
    unknown = [name for name in names if name not in known]
    if unknown and names != (NO_DEVICE,):
        raise unknown_device("--device", unknown[0], tuple(known))
    if names:
        found = tuple(known[name] for name in names if name in known)
    else:  # integrated GPUs are used only where no other one is
        found = tuple(gpu for gpu in gpus if not gpu.shared) or tuple(gpus)
    if split_mode == "none" and found:
        _require_count("--main-gpu", main_gpu + 1, found)
        found = found[main_gpu : main_gpu + 1]
    elif found:
        _require_count("--tensor-split", len(proportions(tensor_split)), found)
    return found


def unknown_device(option: str, name: str, known: Sequence[str]) -> UsageError:
    """Return the error for the name of a device that does not exist."""
    there = f"the devices are {', '.join(known)}" if known else "llama.cpp finds no GPU"
    hint = f"{option} {known[0]}" if known else "llmrun doctor shows the GPUs, and what a GPU still needs"
    return UsageError(f"there is no device {name} for {option}", why=there, hint=hint)


def _require_count(option: str, count: int, found: Sequence[Gpu]) -> None:
    if count > len(found):
        names = ", ".join(f"{number} {gpu.name}" for number, gpu in enumerate(found))
        hint = f"leave out {option}; --device chooses among GPUs"
        raise UsageError(f"{option} names more GPUs than there are", why=f"the GPUs are {names}", hint=hint)

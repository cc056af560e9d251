"""A device, as the engine reports it to the front."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device besides the CPU that ggml can compute on."""

    name: str  # ggml's, e.g. "CUDA0"
    description: str  # e.g. "NVIDIA GeForce RTX 3060"
    memory_total: int  # bytes
    memory_free: int  # bytes
    shared: bool = False  # its memory is the machine's RAM, as with integrated graphics

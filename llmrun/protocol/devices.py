"""A device as the engine sees it and the front reckons with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device that ggml can compute on beside the processor. Only the engine can see it.

    Attributes:
        name: ggml's, e.g. "CUDA0".
        description: e.g. "NVIDIA GeForce RTX 3060".
        memory_total: in bytes.
        memory_free: of that.
        shared: its memory is the machine's own, as of integrated graphics.
    """

    name: str
    description: str
    memory_total: int
    memory_free: int
    shared: bool = False

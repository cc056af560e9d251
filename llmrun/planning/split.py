"""The placement of a model on GPUs: its layers, and a mixture's experts apart from them.

Pure arithmetic over the facts of a header and the free memory. Sizes are in bytes.

A token uses few of a mixture's experts, so they are most of the bytes and little of the work. If not everything fits,
experts stay with the processor first, and the attention of all layers is on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from llmrun.planning.memory import Memory, Sizes, reserved_bytes
from llmrun.protocol.devices import Gpu

ALL_LAYERS = -1
_GPU_MARGIN = 256 << 20  # for the driver and the desktop


class Layers(Sizes, Protocol):
    """The facts of a header that determine the placement."""

    @property
    def n_layers(self) -> int:
        """Transformer blocks."""

    @property
    def expert_bytes(self) -> Mapping[int, int]:
        """Layer -> bytes of its experts; empty for a dense model."""


@dataclass(frozen=True, slots=True)
class Split:
    """The placement of a model."""

    gpu_layers: int  # on GPUs; -1 for all, or if no GPU is known
    ram: int  # bytes in the machine's own memory
    vram: int  # bytes on its GPUs
    cpu_experts: tuple[int, ...] = ()  # layers on a GPU whose experts stay with the processor
    layer_counts: tuple[int, ...] = ()  # of gpu_layers, on each worker's device, then each GPU; () without workers
    remote: int = 0  # bytes on workers


def split_memory(
    header: Layers,
    needs: Memory,
    n_ctx: int,
    gpus: tuple[Gpu, ...],
    preferred: int | None,
    preferred_experts: int | None = None,
) -> Split:
    """Place a model on GPUs and the processor.

    Args:
        needs: of the whole model with that context.
        gpus: integrated ones are skipped, since they have no memory of their own.
        preferred: layers on GPUs; None for as many as fit.
        preferred_experts: layers whose experts stay with the processor; None for as few as allow all layers on GPUs,
            or none if `preferred` is given.
    """
    own = [gpu for gpu in gpus if not gpu.shared]
    if not own:
        return Split(ALL_LAYERS if preferred is None else preferred, needs.needed, 0)
    layers = header.n_layers + 1  # llama.cpp counts the output as one
    experts = header.expert_bytes
    of_layer = (needs.weights + needs.kv - sum(experts.values())) / layers  # the copy that growing takes is in RAM
    free = sum(max(gpu.memory_free - _GPU_MARGIN, 0) for gpu in own)
    reserved = len(own) * reserved_bytes(header, n_ctx)

    def moved(chosen: int, left: tuple[int, ...]) -> int:
        """Return the bytes on GPUs of the last `chosen` layers, without the experts of the layers in `left`."""
        there = sum(size for layer, size in experts.items() if layer >= layers - chosen and layer not in left)
        return int(chosen * of_layer) + there

    def taken(chosen: int, left: tuple[int, ...]) -> int:
        # A micro-batch's experts of the processor are copied to the GPU, a matrix at a time.
        copied = max(experts.values()) if left else 0
        return moved(chosen, left) + reserved + copied if chosen else 0

    left: tuple[int, ...] = ()
    if preferred_experts is not None:
        left = _spread(experts, preferred_experts)
    elif preferred is None and experts and taken(layers, left) > free:
        tries = (_spread(experts, count) for count in range(1, len(experts) + 1))
        left = next((each for each in tries if taken(layers, each) <= free), tuple(experts))
    if preferred is None:
        chosen = next((count for count in range(layers, 0, -1) if taken(count, left) <= free), 0)
    else:
        chosen = layers if preferred == ALL_LAYERS else min(preferred, layers)
    gpu_layers = ALL_LAYERS if chosen == layers else chosen
    return Split(gpu_layers, needs.needed - moved(chosen, left), taken(chosen, left), left if chosen else ())


def _spread(experts: Mapping[int, int], count: int) -> tuple[int, ...]:
    """Choose layers with experts, evenly spread, so that each of several GPUs is relieved equally."""
    layers = sorted(experts)
    count = min(count, len(layers))
    return tuple(layers[index * len(layers) // count] for index in range(count))


def described(gpu_layers: int, cpu_experts: int) -> str:
    """Return e.g. "5 layers on the GPU", "all layers on the GPU but for the experts of 12"."""
    layers = "all layers" if gpu_layers == ALL_LAYERS else f"{gpu_layers} layers"
    return f"{layers} on the GPU" + (f" but for the experts of {cpu_experts}" if cpu_experts else "")

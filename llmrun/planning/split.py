"""Where a model lies on a machine with GPUs: its layers, and a mixture's experts apart from them.

Pure arithmetic over the facts of a header and the free memory; must not know how either was found. Sizes are in bytes.

A token wakes few of a mixture's experts, so they are most of the bytes and little of the work: where not everything
fits, they stay with the processor before any layer does. All layers' attention is then on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from llmrun.planning.memory import Memory, Sizes, reserved_bytes
from llmrun.protocol.devices import Gpu

ALL_LAYERS = -1
_GPU_MARGIN = 256 << 20  # the driver's and the desktop's


class Layers(Sizes, Protocol):
    """What splitting needs of a header."""

    @property
    def n_layers(self) -> int:
        """Transformer blocks."""

    @property
    def expert_bytes(self) -> Mapping[int, int]:
        """Layer -> bytes of its experts; none of a dense model."""


@dataclass(frozen=True, slots=True)
class Split:
    """Where a model lies.

    Attributes:
        gpu_layers: on GPUs; -1 when all are, or nobody knows of any GPU.
        ram, vram: bytes on either side.
        cpu_experts: layers whose experts stay with the processor, though the rest of the layer is on a GPU.
        layer_counts: of gpu_layers, how many each device of the workers has, then each GPU; none without workers.
        remote: bytes on workers, which vram does not count.
    """

    gpu_layers: int
    ram: int
    vram: int
    cpu_experts: tuple[int, ...] = ()
    layer_counts: tuple[int, ...] = ()
    remote: int = 0


def split_memory(
    header: Layers,
    needs: Memory,
    n_ctx: int,
    gpus: tuple[Gpu, ...],
    wish: int | None,
    wished_experts: int | None = None,
) -> Split:
    """What the GPUs can hold, and what that leaves to the processor.

    Args:
        needs: of the whole model with that context.
        gpus: integrated ones have no memory of their own, so they hold nothing more.
        wish: how many layers the user wants there; None takes as many as fit.
        wished_experts: of how many layers the user wants to leave the experts with the processor; None leaves as many
            as it takes to have all layers on GPUs, unless the user said how many layers.
    """
    own = [gpu for gpu in gpus if not gpu.shared]
    if not own:
        return Split(ALL_LAYERS if wish is None else wish, needs.needed, 0)
    layers = header.n_layers + 1  # llama.cpp counts the output as one
    experts = header.expert_bytes
    of_layer = (needs.weights + needs.kv - sum(experts.values())) / layers  # the copy that growing takes is in RAM
    free = sum(max(gpu.memory_free - _GPU_MARGIN, 0) for gpu in own)
    reserved = len(own) * reserved_bytes(header, n_ctx)

    def moved(chosen: int, left: tuple[int, ...]) -> int:
        """Bytes of weights and KV cache on GPUs, with the last so many layers there, but for these layers' experts."""
        there = sum(size for layer, size in experts.items() if layer >= layers - chosen and layer not in left)
        return int(chosen * of_layer) + there

    def taken(chosen: int, left: tuple[int, ...]) -> int:
        # Where a micro-batch is multiplied with experts that are not there, they are copied, a matrix at a time.
        copied = max(experts.values()) if left else 0
        return moved(chosen, left) + reserved + copied if chosen else 0

    left: tuple[int, ...] = ()
    if wished_experts is not None:
        left = _spread(experts, wished_experts)
    elif wish is None and experts and taken(layers, left) > free:
        tries = (_spread(experts, count) for count in range(1, len(experts) + 1))
        left = next((each for each in tries if taken(layers, each) <= free), tuple(experts))
    if wish is None:
        chosen = next((count for count in range(layers, 0, -1) if taken(count, left) <= free), 0)
    else:
        chosen = layers if wish == ALL_LAYERS else min(wish, layers)
    gpu_layers = ALL_LAYERS if chosen == layers else chosen
    return Split(gpu_layers, needs.needed - moved(chosen, left), taken(chosen, left), left if chosen else ())


def _spread(experts: Mapping[int, int], count: int) -> tuple[int, ...]:
    """So many of the layers with experts, evenly spread: each of several GPUs gets as much less to hold."""
    layers = sorted(experts)
    count = min(count, len(layers))
    return tuple(layers[index * len(layers) // count] for index in range(count))


def described(gpu_layers: int, cpu_experts: int) -> str:
    """E.g. "5 layers on the GPU", "all layers on the GPU but for the experts of 12"."""
    layers = "all layers" if gpu_layers == ALL_LAYERS else f"{gpu_layers} layers"
    return f"{layers} on the GPU" + (f" but for the experts of {cpu_experts}" if cpu_experts else "")

"""The placement of layers on RPC workers, by the memory that they report. Sizes are in bytes.

llama.cpp's order: the first layers on this machine's processor, then each device of the workers in the user's order,
then this machine's GPUs. A token passes them in sequence: workers add memory, not speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmrun.planning.memory import Memory, reserved_bytes
from llmrun.planning.split import ALL_LAYERS, Split

if TYPE_CHECKING:
    from llmrun.gguf.header import Header
    from llmrun.planning.hardware import Hardware

_LEFT_FREE = 0.1  # of each device's memory; all of a processor's counts as free, even if used


def split_over_workers(header: Header, needs: Memory, n_ctx: int, hardware: Hardware, preferred: int | None) -> Split:
    """Place layers in proportion to the free memory of each machine; the rest stays on this processor.

    Args:
        needs: of the whole model with that context.
        preferred: layers on workers and GPUs; None includes this machine's processor, unless it has GPUs.
    """
    layers = header.n_layers + 1  # llama.cpp counts the output as one
    of_layer = (needs.weights + needs.kv) / layers
    reserved = reserved_bytes(header, n_ctx)
    free = [device.memory_free for worker in hardware.workers for device in worker.devices]
    n_remote = len(free)
    free += [gpu.memory_free for gpu in hardware.gpus if not gpu.shared]
    rooms = [int(max((1 - _LEFT_FREE) * each - reserved, 0) / of_layer) for each in free]
    here = int(max((1 - _LEFT_FREE) * hardware.memory_available - (needs.needed - layers * of_layer), 0) / of_layer)
    if preferred is not None:
        here, layers = 0, layers if preferred == ALL_LAYERS else min(preferred, layers)
    elif len(free) > n_remote:
        here = max(0, layers - sum(rooms))
    _, *counts = divide(layers, (here, *rooms))
    chosen = sum(counts)
    taken = [int(count * of_layer) + reserved if count else 0 for count in counts]
    return Split(
        gpu_layers=ALL_LAYERS if chosen == header.n_layers + 1 else chosen,
        ram=needs.needed - int(chosen * of_layer),
        vram=sum(taken[n_remote:]),
        layer_counts=tuple(counts),
        remote=sum(taken[:n_remote]),
    )


def divide(layers: int, rooms: Sequence[int]) -> tuple[int, ...]:
    """Divide layers among places in proportion to their room in layers; the rest goes to the first.

    Each next layer goes to the place with the smallest filled share.
    """
    counts = [0] * len(rooms)
    for _ in range(min(layers, sum(rooms))):
        shares = [(count + 1) / room if room else math.inf for count, room in zip(counts, rooms, strict=True)]
        counts[shares.index(min(shares))] += 1
    counts[0] += layers - sum(counts)
    return tuple(counts)


def places(layers: int, hardware: Hardware, split: Split) -> list[tuple[str, int]]:
    """Return the places in llama.cpp's order with their number of layers."""
    names = [worker.endpoint for worker in hardware.workers for _ in worker.devices]
    names += [f"{gpu.name} here" for gpu in hardware.gpus if not gpu.shared]
    return [("here", layers - sum(split.layer_counts)), *zip(names, split.layer_counts, strict=True)]


def layer_placement(layers: int, hardware: Hardware, split: Split) -> str:
    """Return e.g. "layers 1-10 of 31 here, 11-20 on 10.0.0.2:50052, 21-31 on 10.0.0.3:50052"."""
    parts, first = [], 1
    for name, count in places(layers, hardware, split):
        last = first + count - 1
        numbers = "none" if not count else f"{first}-{last}" if count > 1 else str(first)
        parts.append(f"{numbers} {name}" if name.endswith("here") else f"{numbers} on {name}")
        first += count
    return f"layers {', '.join(parts)}; {layers} in all, the last is the output"

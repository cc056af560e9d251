"""The placement of a model on GPUs, the processor and RPC workers: its layers, and a mixture's experts apart from them.

Pure arithmetic over the facts of a header and the free memory. Sizes are in bytes.

A token uses few of a mixture's experts, so they are most of the bytes and little of the work. If not everything fits,
experts stay with the processor first, and the attention of all layers is on the GPU.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from llmrun.planning.memory import Memory, logit_bytes, pipeline_bytes, reserved_bytes
from llmrun.planning.preferences import ALL_LAYERS
from llmrun.protocol.devices import Gpu, proportions, tensor_overrides
from llmrun.protocol.sizes import readable_size

if TYPE_CHECKING:
    from llmrun.gguf.header import Header
    from llmrun.planning.hardware import Hardware
    from llmrun.planning.preferences import LoadPreferences


_GPU_MARGIN = 256 << 20  # for the driver and the desktop


@dataclass(frozen=True, slots=True)
class Split:
    """The placement of a model."""

    gpu_layers: int  # on GPUs; -1 for all, or if no GPU is known
    ram: int  # bytes in the machine's own memory
    vram: int  # bytes on its GPUs
    cpu_experts: tuple[int, ...] = ()  # layers on a GPU whose experts stay with the processor
    layer_counts: tuple[int, ...] = ()  # of gpu_layers, on each worker's device, then each GPU; () without workers
    remote: int = 0  # bytes on workers
    gpu_counts: tuple[int, ...] = ()  # of gpu_layers, on each GPU with its own memory; () with workers
    gpu_bytes: tuple[tuple[str, int], ...] = ()  # name and bytes of each GPU with its own memory; () with workers


class _Placement:
    """llama.cpp's distribution of layers over GPUs (llama_model_base::load_tensors), and its bytes on each."""

    def __init__(
        self,
        header: Header,
        needs: Memory,
        n_ctx: int,
        gpus: Sequence[Gpu],
        preferences: LoadPreferences,
        excess: Mapping[str, int],
    ) -> None:
        self._header, self._needs, self._n_ctx, self._preferences = header, needs, n_ctx, preferences
        parts = proportions(preferences.tensor_split)
        self._parts = [*parts, *[0.0] * (len(gpus) - len(parts))] if parts else [gpu.memory_free for gpu in gpus]
        if preferences.split_mode == "tensor" and not parts:
            self._parts = [1.0] * len(gpus)
        with_scores = preferences.flash_attention == "off"
        self._scratch = reserved_bytes(header, n_ctx, ubatch=preferences.micro_batch, with_scores=with_scores)
        self._shares, self._experts = header.layer_shares, header.expert_bytes
        self.layers = len(self._shares.weights)  # llama.cpp counts the output as one
        self._moved_from: Counter[int] = Counter()  # layer -> bytes of tensors that --override-tensor moves
        self._moved_to = [0] * len(gpus)
        self._largest_moved = 0  # of those in RAM
        self._excess = [excess.get(gpu.name, 0) for gpu in gpus]
        self._move(preferences.override_tensor, [gpu.name for gpu in gpus])

    def _move(self, text: str, names: Sequence[str]) -> None:
        overrides = [(re.compile(override.pattern), override.device) for override in tensor_overrides(text)]
        for name, (layer, share) in self._shares.tensors.items() if overrides else ():
            device = next((device for pattern, device in overrides if pattern.search(name)), None)
            size = int(share * self._needs.weights)
            if device is None:
                continue
            self._moved_from[layer] += size
            if device in names:
                self._moved_to[names.index(device)] += size
            else:
                self._largest_moved = max(self._largest_moved, size)

    def layers_of(self, chosen: int) -> list[range]:
        """Return the layers of each GPU: by its free memory or --tensor-split, the last `chosen` in all."""
        total, first = sum(self._parts) or 1, self.layers - chosen
        ends = [first + math.ceil(chosen * sum(self._parts[:count]) / total) for count in range(len(self._parts))]
        return [range(start, end) for start, end in pairwise([*ends, self.layers])]

    def _held(self, layer: int, left: tuple[int, ...]) -> int:
        """Return the bytes of a layer's weights and KV cache; a copy that growing takes is in RAM."""
        shares, needs = self._shares, self._needs
        kv = needs.kv_shares[layer] * needs.kv if layer < len(needs.kv_shares) else 0
        moved = self._moved_from[layer] or (self._experts.get(layer, 0) if layer in left else 0)
        return int(shares.weights[layer] * needs.weights + kv) - moved

    def saved(self, chosen: int, left: tuple[int, ...]) -> int:
        """Return the bytes that RAM does not hold; arguments as in taken()."""
        held = sum(self._held(layer, left) for layer in range(self.layers - chosen, self.layers))
        return held + sum(self._moved_to) - int(self._shares.copied * self._needs.weights) * bool(chosen)

    def taken(self, chosen: int, left: tuple[int, ...]) -> list[int]:
        """Return the bytes of each GPU.

        Args:
            chosen: number of layers on GPUs, the last ones.
            left: layers without their experts.
        """
        scratch, sizes = self._scratch, []
        mode, overrides = self._preferences.split_mode, self._preferences.override_tensor
        if len(self._parts) > 1 and chosen == self.layers and mode == "layer" and not (left or overrides):
            scratch += pipeline_bytes(self._header, self._n_ctx, self._preferences.micro_batch)
        by_gpu = [sum(self._held(layer, left) for layer in layers) for layers in self.layers_of(chosen)]
        if mode == "tensor":
            by_gpu = [int(sum(by_gpu) * part / sum(self._parts)) for part in self._parts]
        for layers, held, moved in zip(self.layers_of(chosen), by_gpu, self._moved_to, strict=True):
            has_output_alone = layers == range(self.layers - 1, self.layers) and mode != "tensor"
            size = held + moved
            sizes.append(size + (logit_bytes(self._header) if has_output_alone else scratch) if size else 0)
        if left or self._largest_moved or chosen < self.layers:
            # Prompts are computed on the first GPU, also with weights in RAM: a matrix is copied for a micro-batch.
            sizes[0] = max(sizes[0], scratch + by_gpu[0] + self._moved_to[0])
            copied = max(self._experts.values()) if left else self._shares.largest * self._needs.weights
            sizes[0] += self._largest_moved if chosen == self.layers and not left else int(copied)
        return [max(size + more, 0) if size else 0 for size, more in zip(sizes, self._excess, strict=True)]


def split_model(
    header: Header,
    needs: Memory,
    n_ctx: int,
    hardware: Hardware,
    preferences: LoadPreferences,
    excess: Mapping[str, int] = {},
) -> Split:
    """Place a model on the processor, GPUs and RPC workers.

    Args:
        needs: of the whole model with that context window.
        hardware: with the GPUs to use; integrated ones are skipped, since they have no memory of their own.
        preferences: without gpu_layers, as many layers as fit are on GPUs; without cpu_experts, as few experts stay
            with the processor as allow all layers on GPUs, or none if gpu_layers is given.
        excess: bytes of a GPU beyond an earlier plan, by its name.
    """
    if hardware.workers:
        return _split_over_workers(header, needs, n_ctx, hardware, preferences.gpu_layers)
    preferred = preferences.gpu_layers
    separate = [gpu for gpu in hardware.gpus if not gpu.shared]
    if not separate:
        return Split(ALL_LAYERS if preferred is None else preferred, needs.needed, 0)
    placement = _Placement(header, needs, n_ctx, separate, preferences, excess)
    layers, experts = placement.layers, header.expert_bytes

    def fits(chosen: int, left: tuple[int, ...]) -> bool:
        taken = placement.taken(chosen, left)
        return all(size <= max(gpu.memory_free - _GPU_MARGIN, 0) for size, gpu in zip(taken, separate, strict=True))

    left: tuple[int, ...] = ()
    if preferences.cpu_experts is not None:
        left = _spread(experts, preferences.cpu_experts)
    elif preferred is None and experts and not fits(layers, left):
        tries = (_spread(experts, count) for count in range(1, len(experts) + 1))
        left = next((layer_numbers for layer_numbers in tries if fits(layers, layer_numbers)), tuple(experts))
    if preferred is None:
        chosen = next((count for count in range(layers, 0, -1) if fits(count, left)), 0)
    else:
        chosen = layers if preferred == ALL_LAYERS else min(preferred, layers)
    left = left if chosen else ()
    taken = placement.taken(chosen, left)
    return Split(
        gpu_layers=ALL_LAYERS if chosen == layers else chosen,
        ram=needs.needed - placement.saved(chosen, left),
        vram=sum(taken),
        cpu_experts=left,
        gpu_counts=tuple(map(len, placement.layers_of(chosen))),
        gpu_bytes=tuple((gpu.name, size) for gpu, size in zip(separate, taken, strict=True)),
    )


def _spread(experts: Mapping[int, int], count: int) -> tuple[int, ...]:
    """Choose layers with experts, evenly spread, so that each of several GPUs is relieved equally."""
    layers = sorted(experts)
    count = min(count, len(layers))
    return tuple(layers[index * len(layers) // count] for index in range(count))


def described(gpu_layers: int, cpu_experts: int) -> str:
    """Return e.g. "5 layers on the GPU", "all layers on the GPU but for the experts of 12"."""
    layers = "all layers" if gpu_layers == ALL_LAYERS else f"{gpu_layers} layers"
    return f"{layers} on the GPU" + (f" but for the experts of {cpu_experts}" if cpu_experts else "")


def placement_notes(header: Header, hardware: Hardware, split: Split, preferences: LoadPreferences) -> list[str]:
    """Return what to say about a split; arguments as in split_model()."""
    if hardware.workers:
        return [_layers_by_machine(header.n_layers + 1, hardware, split)]
    if preferences.cpu_experts and not split.cpu_experts:
        return [f"--n-cpu-moe changes nothing: {'nothing is on a GPU' if header.expert_bytes else 'no experts'}"]
    free = {gpu.name: gpu.memory_free for gpu in hardware.gpus if not gpu.shared}
    if (preferences.gpu_layers, preferences.cpu_experts) != (None, None):
        return [
            f"{name} has {readable_size(free[name])} free, but this takes {readable_size(size)}: loading may fail or "
            "be slow (without -ngl, as many layers as fit are put there)"
            for name, size in split.gpu_bytes
            if size > free[name]
        ]
    if not split.gpu_layers or not split.gpu_bytes or (split.gpu_layers == ALL_LAYERS and not split.cpu_experts):
        return []
    where = described(split.gpu_layers, len(split.cpu_experts))
    if split.gpu_layers != ALL_LAYERS:
        where = where.replace(" layers", f" of {header.n_layers + 1} layers", 1)
    return [f"{where}: what fits into its {readable_size(sum(free.values()))} of free memory"]


_LEFT_FREE = 0.1  # of each device's memory; all of a processor's counts as free, even if used


def _split_over_workers(header: Header, needs: Memory, n_ctx: int, hardware: Hardware, preferred: int | None) -> Split:
    """Place layers in proportion to the free memory of each machine; the rest stays on this processor.

    Args:
        preferred: layers on workers and GPUs; None includes this machine's processor, unless it has GPUs.
    """
    layers = header.n_layers + 1  # llama.cpp counts the output as one
    of_layer = (needs.weights + needs.kv) / layers
    reserved = reserved_bytes(header, n_ctx)
    free = [free for worker in hardware.workers for free in worker.memory_free]
    n_remote = len(free)
    free += [gpu.memory_free for gpu in hardware.gpus if not gpu.shared]
    rooms = [int(max((1 - _LEFT_FREE) * room - reserved, 0) / of_layer) for room in free]
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


def _layers_by_machine(layers: int, hardware: Hardware, split: Split) -> str:
    """Return e.g. "layers 1-10 of 31 here, 11-20 on 10.0.0.2:50052, 21-31 on 10.0.0.3:50052"."""
    names = ["here", *(f"on {worker.endpoint}" for worker in hardware.workers for _ in worker.memory_free)]
    names += [f"{gpu.name} here" for gpu in hardware.gpus if not gpu.shared]
    counts = (layers - sum(split.layer_counts), *split.layer_counts)  # in llama.cpp's order
    parts, first = [], 1
    for name, count in zip(names, counts, strict=True):
        last = first + count - 1
        numbers = "none" if not count else f"{first}-{last}" if count > 1 else str(first)
        parts.append(f"{numbers} {name}")
        first += count
    return f"layers {', '.join(parts)}; {layers} in all, the last is the output"

"""Which of a model's layers lie on which machine, and what the network between them costs.

Pure arithmetic over facts that others asked for (runner/workers.py); must not open connections. Sizes are in bytes,
times in seconds.

llama.cpp's order: the first layers on the processor here, then each device of the workers as they were named, then the
GPUs here. A token goes through them one after the other: workers add memory, not speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmrun.planning.memory import Memory, reserved_bytes
from llmrun.planning.split import ALL_LAYERS, Layers, Split, split_memory

if TYPE_CHECKING:
    from llmrun.planning.hardware import Hardware
    from llmrun.planning.predict import Prediction, Work
    from llmrun.protocol.jobs.kernels import MachineSpeed
    from llmrun.runner.workers import RpcWorker

_LEFT_FREE = 0.1  # of each device's memory; a processor's counts as free however much of it is used

# What ggml's client sends to each worker's device for one batch, as counted on the wire.
_MESSAGES = 8  # inputs, the graph that is to be computed again, the question for the result; none but the last waits
_MESSAGE_SECONDS = 25e-6  # to write one, read and check it
_MESSAGE_BYTES = 320  # a tensor's description
_GRAPH_BYTES = 13_000  # of a layer's graph, sent once for a batch of another shape
_F32, _F16 = 4, 2


def split_model(
    header: Layers,
    needs: Memory,
    n_ctx: int,
    hardware: Hardware,
    wish: int | None = None,
    wished_experts: int | None = None,
    *,
    with_scores: bool = False,
) -> Split:
    """Where a model lies, over workers or not; arguments as in split.split_memory()."""
    if hardware.workers:
        return _split_over_workers(header, needs, n_ctx, hardware, wish)
    return split_memory(header, needs, n_ctx, hardware.gpus, wish, wished_experts, with_scores=with_scores)


def _split_over_workers(header: Layers, needs: Memory, n_ctx: int, hardware: Hardware, wish: int | None) -> Split:
    """Layers in proportion to what each machine has free; what fits nowhere stays here.

    Args:
        needs: of the whole model with that context.
        wish: how many layers the user wants on workers and GPUs; None takes the processor here for one more place,
            unless there are GPUs.
    """
    layers = header.n_layers + 1  # llama.cpp counts the output as one
    of_layer = (needs.weights + needs.kv) / layers
    reserved = reserved_bytes(header, n_ctx)
    free = [device.memory_free for worker in hardware.workers for device in worker.devices]
    n_remote = len(free)
    free += [gpu.memory_free for gpu in hardware.gpus if not gpu.shared]
    rooms = [int(max((1 - _LEFT_FREE) * each - reserved, 0) / of_layer) for each in free]
    here = int(max((1 - _LEFT_FREE) * hardware.memory_available - (needs.needed - layers * of_layer), 0) / of_layer)
    if wish is not None:
        here, layers = 0, layers if wish == ALL_LAYERS else min(wish, layers)
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
    """How many layers each place gets, in proportion to how many it has room for; what fits nowhere goes to the first.

    The next layer goes where the filled share of the room stays smallest.
    """
    counts = [0] * len(rooms)
    for _ in range(min(layers, sum(rooms))):
        shares = [(count + 1) / room if room else math.inf for count, room in zip(counts, rooms, strict=True)]
        counts[shares.index(min(shares))] += 1
    counts[0] += layers - sum(counts)
    return tuple(counts)


def places(layers: int, hardware: Hardware, split: Split) -> list[tuple[str, int]]:
    """Each place in llama.cpp's order, and how many of the layers lie there."""
    names = [worker.endpoint for worker in hardware.workers for _ in worker.devices]
    names += [f"{gpu.name} here" for gpu in hardware.gpus if not gpu.shared]
    return [("here", layers - sum(split.layer_counts)), *zip(names, split.layer_counts, strict=True)]


def layer_placement(layers: int, hardware: Hardware, split: Split) -> str:
    """E.g. "layers 1-10 of 31 here, 11-20 on 10.0.0.2:50052, 21-31 on 10.0.0.3:50052"."""
    parts, first = [], 1
    for name, count in places(layers, hardware, split):
        last = first + count - 1
        numbers = "none" if not count else f"{first}-{last}" if count > 1 else str(first)
        parts.append(f"{numbers} {name}" if name.endswith("here") else f"{numbers} on {name}")
        first += count
    return f"layers {', '.join(parts)}; {layers} in all, the last is the output"


@dataclass(frozen=True, slots=True)
class NetworkCost:
    """What the network takes of each token of an answer.

    Attributes:
        round_trips: questions that are waited for, one for each worker's device with layers.
        n_bytes: sent and received.
        seconds: of both together.
    """

    round_trips: int
    n_bytes: int
    seconds: float


def network_cost(work: Work, hardware: Hardware, counts: Sequence[int], tokens: int = 1) -> NetworkCost:
    """Of one batch of so many tokens, whose logits are wanted of the last.

    Between two devices what a block hands to the next comes back here and goes on.

    Args:
        counts: layers of each worker's device, as in Split.
    """
    devices = [worker for worker in hardware.workers for _ in worker.devices]
    used = [(worker, count) for worker, count in zip(devices, counts, strict=False) if count]
    round_trips = n_bytes = 0
    seconds = 0.0
    output_is_remote = len(counts) == len(devices) or not any(counts[len(devices) :])
    for worker, count in used:
        is_last = output_is_remote and worker is used[-1][0]
        up = tokens * work.width * _F32 + _MESSAGES * _MESSAGE_BYTES
        if tokens > 1:
            up += count * _GRAPH_BYTES + tokens * tokens * _F16
        down = work.vocabulary * _F32 if is_last else tokens * work.width * _F32
        round_trips += 1
        n_bytes += up + down
        seconds += worker.round_trip + _MESSAGES * _MESSAGE_SECONDS
        if worker.link is not None:
            seconds += up / worker.link.up + down / worker.link.down
    return NetworkCost(round_trips, n_bytes, seconds)


def predict_over_workers(
    work: Work,
    speeds: Sequence[MachineSpeed],
    hardware: Hardware,
    counts: Sequence[int],
    *,
    depth: int = 0,
    prompt: int = 512,
    kv_type: str = "f16",
    copies: int = 0,
) -> Prediction:
    """How fast a model is whose layers lie on several machines, which compute one after the other.

    Args:
        speeds: of the processor here, then of each worker's device.
        counts: layers of each worker's device, as in Split; the rest is here.
        depth, prompt, kv_type, copies: as in predict.predict().
    """
    from llmrun.planning.predict import ANSWER_SECONDS, Prediction, decode_seconds, load_seconds, prefill_seconds

    blocks = round(work.layers)
    shares = [blocks + 1 - sum(counts), *counts]
    last = max(index for index, count in enumerate(shares) if count)
    decode, prefill = ANSWER_SECONDS, 0.0
    # GPUs here come behind; where they have layers, nobody can predict.
    for index, (speed, count) in enumerate(zip(speeds, shares, strict=False)):
        if count:
            part = part_of(work, (count - (index == last)) / max(blocks, 1), with_output=index == last)
            decode += decode_seconds(part, speed, depth, kv_type)
            prefill += prefill_seconds(part, speed, prompt, kv_type)
    decode += network_cost(work, hardware, counts).seconds
    prefill += network_cost(work, hardware, counts, prompt).seconds / prompt
    load = load_seconds(work, copies) + _sending_seconds(work, hardware.workers, counts)
    return Prediction(load, 1 / max(prefill, 1e-9), 1 / max(decode, 1e-9))


def part_of(work: Work, share: float, *, with_output: bool) -> Work:
    """The work of so many of the blocks, and of the output matrix or not."""

    def scaled(sizes: Mapping[str, float]) -> dict[str, float]:
        return {kind: size * share for kind, size in sizes.items()}

    blocks = {kind: size - work.output_bytes.get(kind, 0) for kind, size in work.decode_bytes.items()}
    decode = scaled(blocks)
    for kind, size in work.output_bytes.items() if with_output else ():
        decode[kind] = decode.get(kind, 0) + size
    return replace(
        work,
        decode_bytes=decode,
        prefill_weights=scaled(work.prefill_weights),
        layers=work.layers * share,
        looking=work.looking * share,
        looking_near=work.looking_near * share,
        kv_elements=work.kv_elements * share,
        kv_elements_near=work.kv_elements_near * share,
    )


def _sending_seconds(work: Work, workers: Sequence[RpcWorker], counts: Sequence[int]) -> float:
    """To send each worker its weights, one after the other."""
    of_layer = sum(work.file_bytes.values()) / (work.layers + 1)
    links = [worker.link for worker in workers for _ in worker.devices]
    return sum(count * of_layer / link.up for link, count in zip(links, counts, strict=False) if link)

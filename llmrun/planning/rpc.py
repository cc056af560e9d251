"""The placement of layers on RPC workers, and the cost of the network.

Pure arithmetic over the facts of runner/workers.py. Sizes are in bytes, times in seconds.

llama.cpp's order: the first layers on this machine's processor, then each device of the workers in the user's order,
then this machine's GPUs. A token passes them in sequence: workers add memory, not speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmrun.planning.memory import Memory, reserved_bytes
from llmrun.planning.split import ALL_LAYERS, Split

if TYPE_CHECKING:
    from llmrun.gguf.header import Header
    from llmrun.planning.hardware import Hardware
    from llmrun.planning.predict import Prediction, Work
    from llmrun.protocol.jobs.kernels import MachineSpeed
    from llmrun.runner.workers import RpcWorker

_LEFT_FREE = 0.1  # of each device's memory; all of a processor's counts as free, even if used

# Messages of ggml's client to each worker's device for one batch, as counted on the wire.
_MESSAGES = 8  # inputs, the repeated graph, the request for the result; only the last one waits
_MESSAGE_SECONDS = 25e-6  # to write one, read and check it
_MESSAGE_BYTES = 320  # a tensor's description
_GRAPH_BYTES = 13_000  # of a layer's graph, sent with each new shape of batch
_F32, _F16 = 4, 2


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


@dataclass(frozen=True, slots=True)
class NetworkCost:
    """The network's cost of each token of an answer."""

    round_trips: int  # one for each worker's device with layers
    n_bytes: int  # sent and received
    seconds: float  # of round trips and bytes


def network_cost(work: Work, hardware: Hardware, counts: Sequence[int], tokens: int = 1) -> NetworkCost:
    """Return the network's cost of one batch of tokens with logits of the last.

    Activations between two devices pass through this machine.

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
    """Predict the speed of a model on several machines, which compute in sequence.

    Args:
        speeds: of this processor, then of each worker's device.
        counts: layers of each worker's device, as in Split; the rest is on this processor.
        depth, prompt, kv_type, copies: as in predict.predict().
    """
    from llmrun.planning.predict import ANSWER_SECONDS, Prediction, decode_seconds, load_seconds, prefill_seconds

    blocks = round(work.layers)
    shares = [blocks + 1 - sum(counts), *counts]
    last = max(index for index, count in enumerate(shares) if count)
    decode, prefill = ANSWER_SECONDS, 0.0
    # Layers on this machine's GPUs, which come last, can't be predicted.
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
    """Return the work of a share of the blocks, with or without the output matrix."""

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
        full_layers=work.full_layers * share,
        window_layers=work.window_layers * share,
        kv_elements=work.kv_elements * share,
        window_kv_elements=work.window_kv_elements * share,
    )


def _sending_seconds(work: Work, workers: Sequence[RpcWorker], counts: Sequence[int]) -> float:
    """Return the time to send the workers their weights in sequence."""
    of_layer = sum(work.file_bytes.values()) / (work.layers + 1)
    links = [worker.link for worker in workers for _ in worker.devices]
    return sum(count * of_layer / link.up for link, count in zip(links, counts, strict=False) if link)

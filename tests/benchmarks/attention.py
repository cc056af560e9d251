"""Compare llmrun's attention with ggml's, in turns, the shortest time of each.

    python tests/benchmarks/attention.py

LLMRUN_KERNELS=AVX2 measures ours for AVX2 (beside ggml's of LLMRUN_CPU=haswell, if this build has variants).
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator

import numpy as np

from llmrun import _native
from llmrun.engine.llama.ggml import GgmlTensor, Operations, type_numbers
from llmrun.engine.llama.library import kernels, start

TURNS = 3
# Query heads, heads of keys and values, head size.
HEADS = {"SmolLM2": (9, 3, 64), "1B": (32, 8, 64), "8B": (32, 8, 128)}
# The last positions of how many cells, as in the last batch of a prompt, and in decode steps.
POSITIONS = ((512, 512), (512, 2048), (512, 8192), (1, 512), (1, 4096), (1, 8192))
LAYERS = 16  # whose cells don't fit into the processor's caches together, as in a model
SECONDS, REPEATS = 0.5, 20


def attention(
    ggml: Operations, heads: tuple[int, int, int], kind: str, positions: int, cells: int
) -> Iterator[tuple[bool, float]]:
    """Yield the seconds of an attention operation: whether by our kernels, and the shortest time of a turn."""
    layers = LAYERS if positions == 1 else 1
    n_heads, n_kv_heads, size = heads
    with ggml.tensors() as place:
        number = type_numbers()[kind]
        mask = ggml.tensor(place, type_numbers()["F16"], cells, positions)
        result = 0
        for _ in range(layers):
            tensors = [ggml.tensor(place, 0, size, n_heads, positions)]
            tensors += (ggml.tensor(place, number, size, n_kv_heads, cells) for _ in range(2))
            parts = [ggml.permute(place, tensor, 0, 2, 1, 3) for tensor in tensors]
            layer = int(ggml.flash_attn_ext(place, *parts, mask, size**-0.5, 0.0, 0.0))
            result = int(ggml.add(place, result, layer)) if result else layer
        with ggml.memory(place, ggml.plain):
            is_hidden = np.arange(cells) - np.arange(positions)[:, None] > cells - positions
            data = np.where(is_hidden, -np.inf, 0.0).astype(np.float16).tobytes()
            ctypes.memmove(GgmlTensor.from_address(mask).data, data, len(data))
            for _ in range(TURNS):
                for is_ours in (True, False):
                    _native.enable_kernels(is_ours)
                    yield is_ours, ggml.seconds(result, SECONDS, REPEATS) / layers


def main() -> None:
    start()
    ggml = Operations(threads=os.cpu_count() or 1)
    print(f"llmrun's kernels: {kernels().name or kernels().problem}")
    for model, heads in HEADS.items():
        for kind in ("F16", "Q8_0"):
            for positions, cells in POSITIONS:
                found: dict[bool, float] = {True: math.inf, False: math.inf}
                for is_ours, seconds in attention(ggml, heads, kind, positions, cells):
                    found[is_ours] = min(found[is_ours], seconds)
                pairs = heads[0] * positions * (cells - (positions - 1) / 2)  # that see each other
                rate = pairs * heads[2] * 2 / found[True] / 1e9
                print(
                    f"{model:8} {kind:5} {positions:4} of {cells:5}  llmrun {found[True] * 1e3:8.3f}  "
                    f"ggml {found[False] * 1e3:8.3f} ms  x {found[False] / found[True]:5.2f}  {rate:5.0f} GMAC/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()

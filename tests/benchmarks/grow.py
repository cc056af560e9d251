"""The longest pause of eight streams while their KV cache takes more memory, before and after zeroing on demand.

    python tests/benchmarks/grow.py [--rounds 3] [--tokens 2048] [--model smollm2]

Three models: one from the store, and two of random weights with large KV caches. Eight sequences grow by 16 tokens each
in every call of llama_decode. A pause is what the longest call took beyond the median of the ten calls around it.
Both sides take turns: a cache that doubles and moves, as on a GPU, and one whose pages take memory on use. All figures
are processor time of one thread, which a busy machine disturbs little.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import peers
from random_model import Shape, write_model

from llmrun import _native
from llmrun.engine.llama import context as context_module
from llmrun.engine.llama import zeroing
from llmrun.engine.llama.base import Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.planning.memory import context_start
from llmrun.protocol.loading import Load

STREAMS, PIECE, NEAR = 8, 16, 5
SHAPES = {  # KV bytes of a token as f16: 4 * key heads * head length * layers
    "8 KiB a token": Shape(512, 8, 512, 8, 4, 64, 1024),
    "32 KiB a token": Shape(512, 16, 512, 8, 8, 64, 1024),
}


class Pauses(NamedTuple):
    """Seconds of processor time."""

    load: float  # to create the context
    longest: float  # call beyond the median around it
    usual: float  # call


def measure(model: LlamaModel, load: Load, n_tokens: int) -> Pauses:
    began = time.thread_time()
    context = LlamaContext(model, load)
    opened = time.thread_time() - began
    seconds: list[float] = []
    for start in range(0, n_tokens, PIECE):
        batch = [Entry(5 + at % 200, at, stream, False) for stream in range(STREAMS) for at in _piece(start)]
        batch[-1] = batch[-1]._replace(wants_logits=True)
        began = time.thread_time()
        context.decode(batch)
        context.synchronize()
        seconds.append(time.thread_time() - began)
    context.close()
    around = [statistics.median(seconds[max(0, i - NEAR) : i + NEAR]) for i in range(len(seconds))]
    beyond = [took - usual for took, usual in zip(seconds, around, strict=True)]
    return Pauses(opened, max(beyond), statistics.median(seconds))


def set_bytes(base: int, size: int, value: int = 0) -> None:
    """Clear a buffer as ggml does."""
    ctypes.memset(base, value, size)


def _piece(start: int) -> range:
    return range(start, start + PIECE)


def main() -> int:
    """Measure and print."""
    parser = peers.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048, help="of each stream")
    options = parser.parse_args()
    on_demand, zero = context_module.zeroes_on_demand, zeroing.zero
    print(f"{'':<24} {'':<10} {'load':>9} {'longest pause':>14} {'usual call':>11}   medians of {options.rounds}, ms")
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            name: write_model(Path(folder) / f"{name}.gguf", shape, lambda name: "Q4_0")
            for name, shape in SHAPES.items()
        }
        paths[options.model] = Path(peers.model_file(peers.find_llmrun(options.llmrun), options.model))
        for name, path in paths.items():
            model = LlamaModel(str(path), 0, _native.CancelFlag())
            window = min(8192, model.header.n_ctx_train or 8192)
            cells = window * STREAMS
            load = Load(
                str(path),
                window,
                context_start(model.header, cells),
                n_seq_max=STREAMS,
                n_cells=cells,
                threads=1,
                flash_attention="on",
            )
            sides = {"doubles": lambda: False, "on use": on_demand}
            found: dict[str, list[Pauses]] = {side: [] for side in sides}
            for _ in range(options.rounds):
                for side, is_on_demand in sides.items():
                    context_module.zeroes_on_demand = is_on_demand  # type: ignore[assignment]
                    zeroing.zero = zero if is_on_demand is on_demand else set_bytes
                    found[side].append(measure(model, load, min(options.tokens, window - 1)))
            for side, rounds in found.items():
                middle = [1000 * statistics.median(each) for each in zip(*rounds, strict=True)]
                print(f"{name:<24} {side:<10} {middle[0]:>9.1f} {middle[1]:>14.1f} {middle[2]:>11.1f}", flush=True)
            model.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

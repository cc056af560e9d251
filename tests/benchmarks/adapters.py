"""What a LoRA adapter costs: decode and prefill without it, loaded but not applied, applied, and changed each time.

    PYTHONPATH=tests python tests/benchmarks/adapters.py MODEL.gguf ADAPTER.gguf [--rounds 10]

The ways take turns, with one thread, and the processor's time is counted, not the clock's: other programs may run.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from llmrun import _native
from llmrun.engine.llama.base import Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.protocol.adapters import Adapter, AdapterScale
from llmrun.protocol.loading import Load

STEPS, PROMPT = 24, 128
ONE = (AdapterScale(0, 1.0),)
WAYS = {"without": ((),), "loaded, not applied": ((),), "applied": (ONE,), "changed each time": (ONE, ())}
"""Name -> the adapters of one batch after the other."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    model = LlamaModel(options.model, 0, _native.CancelFlag())
    adapter = Adapter("adapter", str(options.adapter.absolute()))
    plain = Load(options.model, 512, 512, 512, threads=1, warm_up=True)
    contexts = {
        way: LlamaContext(model, plain if way == "without" else replace(plain, adapters=(adapter,))) for way in WAYS
    }
    decode: dict[str, list[float]] = {way: [] for way in WAYS}
    prefill: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, context in contexts.items():
            context.adapt(WAYS[way][0])
            prefill[way].append(seconds(context, [Entry(100 + n, n, 0, n == PROMPT - 1) for n in range(PROMPT)]))
            for step in range(STEPS):
                context.adapt(WAYS[way][step % len(WAYS[way])])
                decode[way].append(seconds(context, [Entry(100, PROMPT + step, 0, True)]))
            context.forget(0, 0)
    for name, found in (("decode, a token", decode), (f"prefill, {PROMPT} tokens", prefill)):
        least = median(found["without"])
        for way, times in found.items():
            print(f"{name:20} {way:20} {median(times) * 1e3:8.2f} ms  {median(times) / least:.3f}")


def seconds(context: LlamaContext, batch: list[Entry]) -> float:
    """Of the processor."""
    began = time.process_time()
    context.decode(batch)
    context.logits(len(batch) - 1)
    return time.process_time() - began


if __name__ == "__main__":
    main()

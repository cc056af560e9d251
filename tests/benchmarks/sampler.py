"""Microseconds a token of the native sampler and of llama.cpp's chain, on this machine.

    python tests/benchmarks/sampler.py [--calls N]

Both get the same logits in turn, eight rows one after another. Ours is timed with its Python call; of
llama.cpp only llama_sampler_apply is timed, not the filling of its candidates. The last table tells how often
over our sampler reads the logits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.sampler_cases import native_sampler
from support.sampler_llama import LlamaChain

from llmrun import _native
from llmrun.protocol.params import SamplingParams

VOCABULARIES = (49_152, 128_256, 151_936, 262_144)
CHAINS = {
    "default": SamplingParams(),
    "repeat 1.1": SamplingParams(repeat_penalty=1.1),
    "top-k 0": SamplingParams(top_k=0),
    "min-p only": SamplingParams(top_k=0, top_p=1.0),
    "top-p only": SamplingParams(top_k=0, min_p=0.0),
    "greedy": replace(SamplingParams(), temperature=0.0),
}
SECONDS_A_CELL = 5.0


def microseconds(function: Callable[[Any], Any], argument: Any) -> tuple[float, Any]:
    start = time.perf_counter_ns()
    result = function(argument)
    return (time.perf_counter_ns() - start) / 1e3, result


def measure(n_vocab: int, params: SamplingParams, calls: int) -> tuple[float, float, float]:
    """Median times of ours and llama.cpp's, and bytes read per byte of logits."""
    generator = np.random.default_rng(1)
    rows = generator.standard_normal((8, n_vocab), dtype=np.float32) * np.float32(3)
    llama, native = LlamaChain(n_vocab, params, 42), native_sampler(n_vocab, params, 42)
    for token in generator.integers(0, n_vocab, 64).tolist():
        native.accept(token)
        llama.accept(token)
    ours, theirs, read = [], [], []
    ends = time.monotonic() + SECONDS_A_CELL
    while len(ours) < calls and time.monotonic() < ends:
        row = rows[len(ours) % 8]
        time_of_ours, token = microseconds(native.sample, row.ctypes.data)
        time_of_llama, expected = microseconds(llama.apply, llama.fill(row))
        # What top-p leaves of many candidates without top-k is not sorted, and so the same draw is another token.
        unsorted = params.top_k == 0 and params.min_p == 0
        assert unsorted or row[token] == row[expected], "the samplers disagree"
        ours.append(time_of_ours)
        theirs.append(time_of_llama)
        read.append(native.bytes_read / row.nbytes)
        native.accept(expected)
        llama.accept(expected)
    llama.close()
    return statistics.median(ours), statistics.median(theirs), statistics.median(read)


def print_table(title: str, cells: dict[tuple[int, str], str]) -> None:
    print(f"\n{title}\n{'vocabulary':>12}" + "".join(f"{chain:>22}" for chain in CHAINS))
    for n_vocab in VOCABULARIES:
        print(f"{n_vocab:>12,}" + "".join(f"{cells[n_vocab, chain]:>22}" for chain in CHAINS), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="most calls a cell (default: %(default)s)")
    calls = parser.parse_args().calls
    times, reads = {}, {}
    for n_vocab in VOCABULARIES:
        for chain, params in CHAINS.items():
            ours, theirs, read = measure(n_vocab, params, calls)
            times[n_vocab, chain] = f"{ours:.1f} / {theirs:.0f} ({theirs / ours:.0f}x)"
            reads[n_vocab, chain] = f"{read:.2f}"
            print(".", end="", file=sys.stderr, flush=True)
    print(f"\nCPU level: {_native.cpu_level}")
    print_table("µs a token, ours / llama.cpp's, median", times)
    print_table("bytes read per byte of logits, median", reads)


if __name__ == "__main__":
    main()

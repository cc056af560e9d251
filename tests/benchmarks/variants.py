"""Prefill and decode of each processor variant of a wheel, beside a source build and llama-bench.

    python tests/benchmarks/variants.py WHEEL [--source LLMRUN] [--llama-bench PATH ...] [--types Q4_0,Q8_0] [--runs 3]

WHEEL is the command of an environment with a wheel of a release. Each variant worth a comparison here is forced by
LLMRUN_CPU, takes turns with the other sides on a file of random weights for each type, and answers a prompt greedily:
variants of one family should give the same text. Prints the best of all turns, for a busy machine only slows down.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import peers
from random_model import Shape, write_model

TYPES = "Q4_0,Q4_1,Q8_0,Q4_K,F16"
SHAPE = Shape(width=1024, layers=12, feed_forward=3072, heads=16, kv_heads=8, head_length=64, vocabulary=8192)
PROMPT, ANSWER = 128, 24  # tokens


def variants(wheel: str) -> list[str]:
    """Return the variants that are worth a comparison on this processor, the one that ggml chooses first."""
    python = str(Path(wheel).with_name("python"))
    code = "from llmrun.engine.llama.library import distinct_variants, start; start(); print(*distinct_variants())"
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True, cwd="/")
    return done.stdout.split()


def llmrun_rates(command: str, model: Path, threads: int, variant: str = "") -> tuple[float, float]:
    """Return tokens/s of prefill and decode, by `llmrun bench`."""
    environment = {**os.environ, **({"LLMRUN_CPU": variant} if variant else {})}
    arguments = ["bench", str(model), "-p", str(PROMPT), "-n", str(ANSWER), "-r", "2", "-t", str(threads), "--json"]
    done = subprocess.run([command, *arguments], capture_output=True, check=True, env=environment)
    return _best(json.loads(done.stdout))


def llama_bench_rates(command: str, model: Path, threads: int) -> tuple[float, float]:
    """Return tokens/s of prefill and decode, by llama-bench."""
    arguments = ["-m", str(model), "-p", str(PROMPT), "-n", str(ANSWER), "-r", "2", "-t", str(threads), "-o", "json"]
    done = subprocess.run([command, *arguments], capture_output=True, check=True)
    return _best(json.loads(done.stdout))


def _same(kind: str, name: str) -> str:
    return kind


def _best(rows: list[dict[str, list[float]]]) -> tuple[float, float]:
    prefill, decode = (max(row["samples_ts"]) for row in rows)
    return prefill, decode


def answer(command: str, model: Path, threads: int, variant: str) -> bytes:
    """Return the greedy answer to a prompt."""
    arguments = ["run", str(model), "1 2 3", "--temp", "0", "-n", "16", "-t", str(threads), "--speculate", "off"]
    environment = {**os.environ, "LLMRUN_CPU": variant}
    return subprocess.run([command, *arguments], capture_output=True, check=True, env=environment).stdout


def sides_of(chosen: argparse.Namespace, names: list[str], model: Path) -> dict[str, Callable[[], tuple[float, float]]]:
    """Return what measures each side."""
    n_threads = chosen.threads
    sides = {name: partial(llmrun_rates, chosen.wheel, model, n_threads, name) for name in names}
    if chosen.source:
        sides["source"] = partial(llmrun_rates, chosen.source, model, n_threads)
    for tool in chosen.llama_bench:
        sides[f"llama-bench {tool}"] = partial(llama_bench_rates, tool, model, n_threads)
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", metavar="WHEEL", help="llmrun of an environment with a wheel of a release")
    parser.add_argument("--source", metavar="LLMRUN", help="llmrun of an environment with a source install")
    parser.add_argument("--llama-bench", metavar="PATH", action="append", default=[], help="may be given repeatedly")
    parser.add_argument("--types", default=TYPES, help=f"default: {TYPES}")
    parser.add_argument("--runs", type=int, default=3, help="turns of each side; default: 3")
    parser.add_argument("--threads", type=int, default=peers.cores())
    chosen = parser.parse_args()
    peers.warn_if_busy()
    names = variants(chosen.wheel)
    print(f"{'type':<6} {'side':<28} {'prefill':>9} {'decode':>9}   tokens/s; ratios to {names[0]}, which ggml chooses")
    with tempfile.TemporaryDirectory() as folder:
        for kind in chosen.types.split(","):
            path = Path(folder, f"{kind}.gguf")
            model = write_model(path, SHAPE, partial(_same, kind))
            sides = sides_of(chosen, names, model)
            rates = peers.take_turns(chosen.runs, sides)
            best = {side: [max(turns) for turns in zip(*rates[side], strict=True)] for side in sides}
            first = best[names[0]]
            for side, (prefill, decode) in best.items():
                ratio = f"{prefill / first[0]:.2f} {decode / first[1]:.2f}"
                print(f"{kind:<6} {side[-28:]:<28} {prefill:>9.1f} {decode:>9.2f}   {ratio}", flush=True)
            texts: defaultdict[bytes, list[str]] = defaultdict(list)
            for name in names:
                texts[answer(chosen.wheel, model, chosen.threads, name)].append(name)
            print(f"{kind:<6} same greedy text: {'; '.join(' '.join(group) for group in texts.values())}", flush=True)
            path.unlink()


if __name__ == "__main__":
    sys.exit(main())

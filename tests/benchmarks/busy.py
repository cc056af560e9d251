"""Speed beside busy programs: llmrun's own number of threads, each fixed one, and llama.cpp's tools.

    python tests/benchmarks/busy.py [--busy 0 1 2 4] [--models PATH ...] [--before LLMRUN] [--runs 3]
        [--llama-completion PATH] [--llama-server PATH] [--clients 1 4]

For each number of busy programs, which run at normal priority, all sides take turns. Rows are decode and prefill of
`llmrun run`, and tokens/s of all clients of `llmrun serve`. The last columns are llmrun's figure relative to the best
fixed number, to llama.cpp's tool, and to an earlier llmrun (--before). Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import peers
import server
from serving import N_CTX, SENTENCE, SENTENCE_TOKENS, load_from

PROMPT = "Tell me a long story about a river."
N_PARALLEL = 4


def spin() -> None:
    """Compute until the process is ended."""
    while True:
        pass


@contextmanager
def busy(n_programs: int) -> Iterator[None]:
    """Keep programs busy meanwhile; they end with this process."""
    programs = [multiprocessing.Process(target=spin, daemon=True) for _ in range(n_programs)]
    for program in programs:
        program.start()
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.join()


def run(command: list[str]) -> str:
    """Return both outputs of a command."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    ).stdout


def ours(llmrun: str, model: str, prompt: str, n_tokens: int, threads: int | None = None) -> tuple[float, float]:
    """Return tokens/s of prefill and decode of a cold `llmrun run`."""
    command = [
        llmrun,
        "run",
        model,
        prompt,
        "-n",
        str(n_tokens),
        "--seed",
        "1",
        "--json",
        "--speculate",
        "off",
        "-c",
        "4096",
    ]
    said = run([*command, *(["-t", str(threads)] if threads else [])])
    stats = next(event["stats"] for event in map(json.loads, reversed(said.splitlines())) if "stats" in event)
    decode = (stats["completion_tokens"] - 1) / max(stats["decode_seconds"], 1e-9)
    return (stats["prompt_tokens"] - stats["reused_tokens"]) / stats["prefill_seconds"], decode


def theirs(program: str, model: str, prompt: str, n_tokens: int, threads: int) -> tuple[float, float]:
    """Return tokens/s of prefill and decode of llama-completion."""
    options = ["-st", "--jinja", "--no-warmup", "--seed", "1", "-c", "4096", "--perf"]
    said = run([program, "-m", model, "-p", prompt, "-n", str(n_tokens), "-t", str(threads), *options])
    prefill, decode = (
        float(re.search(rf"{name} time =.*?([\d.]+) tokens per second", said)[1])  # type: ignore[index]
        for name in ("prompt eval", r"(?<!prompt )eval")
    )
    return prefill, decode


def add(report: peers.Report, what: str, results: dict[str, list[float]]) -> None:
    """Add the figures of all sides, and llmrun's relative to them."""
    for side, values in results.items():
        report.add(what, values, "tokens/s", side)
    middle = {side: statistics.median(values) for side, values in results.items()}
    fixed = [value for side, value in middle.items() if side.startswith("-t ")]
    others = {"best fixed number": max(fixed)} if fixed else {}
    others |= {side: value for side, value in middle.items() if side.startswith(("llama", "before"))}
    print(what, *(f"{middle['llmrun'] / value:.2f} of {side}" for side, value in others.items()), sep=" · ", flush=True)


def measure_runs(report: peers.Report, options: argparse.Namespace, llmrun: str, model: str, n_busy: int) -> None:
    """Measure `llmrun run` with a short and a long prompt."""
    cores = peers.cores()
    for n_prompt, n_tokens in ((38, options.tokens), (512, 8)):
        prompt = PROMPT if n_prompt < SENTENCE_TOKENS * 5 else SENTENCE * (n_prompt // SENTENCE_TOKENS) + PROMPT
        sides: dict[str, Callable[[], tuple[float, float]]] = {
            "llmrun": lambda prompt=prompt, n=n_tokens: ours(llmrun, model, prompt, n)
        }
        for threads in range(1, cores + 1):
            sides[f"-t {threads}"] = lambda p=prompt, n=n_tokens, t=threads: ours(llmrun, model, p, n, t)
        if options.before:
            sides["before"] = lambda prompt=prompt, n=n_tokens: ours(options.before, model, prompt, n)
        if options.llama_completion:
            sides["llama-completion"] = lambda p=prompt, n=n_tokens: theirs(
                options.llama_completion, model, p, n, cores
            )
        found = peers.take_turns(options.runs, sides)
        name = f"{n_busy} busy, {model.rpartition('/')[2]}"
        add(
            report, f"{name}: prefill of {n_prompt}", {side: [each[0] for each in all_] for side, all_ in found.items()}
        )
        if n_prompt == 38:
            add(report, f"{name}: decode", {side: [each[1] for each in all_] for side, all_ in found.items()})


def measure_serving(report: peers.Report, options: argparse.Namespace, llmrun: str, model: str, n_busy: int) -> None:
    """Measure tokens/s of all clients together."""
    ours = ["serve", model, "--parallel", str(N_PARALLEL), "--ctx", str(N_CTX)]
    commands = {"llmrun": [llmrun, *ours]}
    commands |= {f"-t {threads}": [llmrun, *ours, "-t", str(threads)] for threads in range(1, peers.cores() + 1)}
    if options.before:
        commands["before"] = [options.before, *ours]
    if options.llama_server:
        sizes = ["-t", str(peers.cores()), "-np", str(N_PARALLEL), "-c", str(N_CTX * N_PARALLEL)]
        commands["llama-server"] = [options.llama_server, "-m", model, *sizes, "--jinja", "--no-webui"]
    numbers = itertools.count()
    with ExitStack() as stack:
        ports = {side: stack.enter_context(server.running(command)) for side, command in commands.items()}
        with busy(n_busy):
            for n_clients in options.clients:
                sides = {
                    side: lambda port=port, n=n_clients: (
                        asyncio.run(load_from(port, n, options.tokens, 0, numbers)).rate
                    )
                    for side, port in ports.items()
                }
                what = f"{n_busy} busy, {model.rpartition('/')[2]}: serve, {n_clients} clients"
                add(report, what, peers.take_turns(options.runs, sides))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llmrun", metavar="PATH")
    parser.add_argument("--before", metavar="LLMRUN", help="an earlier version's command")
    parser.add_argument("--models", nargs="+", default=["smollm2"])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--llama-completion", metavar="PATH")
    parser.add_argument("--llama-server", metavar="PATH")
    options = parser.parse_args()
    llmrun = peers.find_llmrun(options.llmrun)
    peers.warn_if_busy()
    report = peers.Report()
    for model in options.models:
        path = peers.model_file(llmrun, model)
        for n_busy in options.busy:
            with busy(n_busy):
                measure_runs(report, options, llmrun, path, n_busy)
            if options.clients:
                measure_serving(report, options, llmrun, path, n_busy)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

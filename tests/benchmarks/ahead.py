"""llmrun beside llama.cpp's own tools, in one table: first byte, one user, many clients, copying.

    PATH=LLAMA_CPP/build/bin:$PATH python tests/benchmarks/ahead.py [--rounds 5] [--only first decode serve long copy]

All sides take turns with the same file and threads. A row is the median of the pairs' ratios with their quartiles; rows
that fall short come first. Above 1 is better everywhere: for seconds, the ratio is turned over. Run it on a machine
that does nothing else; the other benchmarks here say more about each row.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import decode
import first_byte
import peers
import serving

SHORT, LONG = 0, 500  # tokens of a client's own prompt
THROUGHPUT = {1: 1.0, 2: 1.05, 4: 1.2, 8: 1.1}  # number of clients -> wanted tokens/s over llama-server's
COPIED = "The ferry to the island leaves at seven, at noon and at five; in winter only at noon, and never in fog. " * 6


class Row(NamedTuple):
    """A figure of both sides, measured in pairs, and the ratio that is wanted."""

    figure: str
    ours: list[float]
    theirs: list[float]
    unit: str
    wanted: float
    less_is_better: bool = False

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.ours, self.theirs, strict=True)
        return [theirs / ours if self.less_is_better else ours / theirs for ours, theirs in pairs]

    @property
    def missing(self) -> float:
        """Wanted over reached; above 1 falls short."""
        return self.wanted / statistics.median(self.ratios)

    def __str__(self) -> str:
        low, middle, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        ours, theirs = (statistics.median(side) for side in (self.ours, self.theirs))
        words = "falls short" if self.missing > 1 else ""
        ratio = f"{middle:5.2f} [{low:.2f}..{high:.2f}] wanted {self.wanted:.2f}"
        return f"{self.figure:<44} {ours:9,.3f} {theirs:9,.3f} {self.unit:<4} {ratio} {words}"


def first_bytes(options: argparse.Namespace) -> Iterator[Row]:
    for ctx in (2048, 8192):
        options.ctx = ctx
        commands = first_byte.commands(options)
        sides = {name: partial(first_byte.measure, command) for name, command in commands.items()}
        ours, theirs = ([run.first for run in runs] for runs in peers.take_turns(options.rounds, sides).values())
        yield Row(f"first byte, --ctx {ctx}", ours, theirs, "s", 1 / 0.95, less_is_better=True)


def decode_rates(options: argparse.Namespace) -> Iterator[Row]:
    prompt, size = "Write the numbers from 1 to 1000 in words, one a line.", ["-n", "256", "--temp", "0"]
    ours = [options.llmrun, "run", options.model, prompt, *size, "-t", options.threads, "--speculate", "off", "--stats"]
    theirs = [peers.find_tool("llama-completion", None), "-m", options.path, "-p", prompt, *size]
    theirs += ["-t", options.threads, "-c", "8192", "-st", "--jinja"]
    sides: dict[str, Callable[[], float]] = {
        "llmrun": lambda: decode.on_a_terminal(ours).reported,
        "llama-completion": lambda: decode.llama_completion(theirs),
    }
    found = peers.take_turns(options.rounds, sides)
    yield Row("decode to a terminal", found["llmrun"], found["llama-completion"], "t/s", 0.98)
    overheads = [decode.overhead(ours[:-1]) for _ in range(options.rounds)]
    yield Row("outside llama_decode, a token (beside 90)", overheads, [90.0] * options.rounds, "us", 1.0, True)


def served(options: argparse.Namespace, n_before: int) -> Iterator[Row]:
    numbers, program = itertools.count(), peers.find_tool("llama-server", None)
    threads = int(options.threads)
    with (
        serving.serving(options.llmrun, options.path, threads) as ours,
        serving.llama_serving(program, options.path, threads) as theirs,
    ):
        for clients in THROUGHPUT if n_before == SHORT else (8,):
            load = partial(_load, clients, n_before, numbers)
            sides = {"llmrun": partial(load, ours), "llama-server": partial(load, theirs)}
            found = peers.take_turns(options.rounds, sides).values()
            # Each of rate, TTFT, inter-token p50 and p95: our rounds and theirs.
            rates, ttfts, p50s, p95s = ([[float(run[field]) for run in runs] for runs in found] for field in range(4))
            name = f"{clients} clients, own prompts of {n_before} tokens" if n_before else f"{clients} clients"
            wanted = 1.05 if n_before else THROUGHPUT[clients]
            yield Row(f"{name}, all together", rates[0], rates[1], "t/s", wanted)
            yield Row(f"{name}, TTFT p50", ttfts[0], ttfts[1], "s", 1.0, less_is_better=True)
            yield Row(f"{name}, inter-token p50", p50s[0], p50s[1], "s", 1 / 1.1, less_is_better=True)
            if n_before:
                limit = [0.120] * options.rounds
                yield Row(f"{name}, inter-token p95 (beside 0.120)", p95s[0], limit, "s", 1.0, True)


def _load(clients: int, n_before: int, numbers: Iterator[int], port: int) -> serving.Served:
    return asyncio.run(serving.load_from(port, clients, 64, n_before, numbers))


def copying(options: argparse.Namespace) -> Iterator[Row]:
    """Drafts begin with the first run on a machine."""
    prompt = f"Repeat this text twice, word for word.\n\n{COPIED}"
    command = [options.llmrun, "run", options.model, prompt, "-n", "300", "--temp", "0", "--stats"]
    with tempfile.TemporaryDirectory() as home:
        os.environ["LLMRUN_HOME"] = home
        sides: dict[str, Callable[[], float]] = {
            "auto": lambda: decode.on_a_terminal(command).reported,
            "off": lambda: decode.on_a_terminal([*command, "--speculate", "off"]).reported,
        }
        ours, theirs = peers.take_turns(options.rounds, sides).values()
        del os.environ["LLMRUN_HOME"]
    yield Row("copying 600 characters twice, / --speculate off", ours, theirs, "t/s", 1.5)


def main() -> int:
    """Measure and print."""
    parts: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
        "first": first_bytes,
        "decode": decode_rates,
        "serve": lambda options: served(options, SHORT),
        "long": lambda options: served(options, LONG),
        "copy": copying,
    }
    parser = peers.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    options = parser.parse_args()
    options.rounds = max(options.rounds, 2)  # quartiles
    options.llmrun, options.llama_completion = peers.find_llmrun(options.llmrun), None
    options.prompt, options.max_tokens, options.raw = "Why is the sky blue?", 16, False
    options.path = peers.model_file(options.llmrun, options.model)
    options.threads = str(options.threads or peers.cores())
    peers.warn_if_busy()
    rows: list[Row] = []
    for name in options.only:
        for row in parts[name](options):
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    rows.sort(key=lambda row: row.missing, reverse=True)
    print(f"\n{'':<44} {'llmrun':>9} {'other':>9}")
    print(*rows, sep="\n")
    print(json.dumps([{**row._asdict(), "ratios": row.ratios} for row in rows]), file=sys.stderr)
    return int(any(row.missing > 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""What watermarks cost, from which length on they are found, and how often they are found where there are none.

    python tests/benchmarks/watermark.py cost
    python tests/benchmarks/watermark.py chance MODEL TEXT     # a long text by people, cut into 1,000 texts
    python tests/benchmarks/watermark.py lengths MODEL SCHEME KEY ANSWERS   # of `llmrun batch --watermark ...`

The cost is that of the native sampler's Python call, plain and marked in turn on the same rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from llmrun import _native
from llmrun.config import load_settings
from llmrun.lab.insight.tokens import tokenize_text
from llmrun.lab.insight.watermark import find_watermark
from llmrun.models.location import locate
from llmrun.protocol.watermark import read_watermark
from llmrun.runner.client import EngineClient

SCHEMES = ("green", "green,selfhash=4")
VOCABULARIES = (49_152, 151_936)
CHAINS = {"default": {}, "top-k 40 alone": {"top_p": 1.0, "min_p": 0.0}, "greedy": {"temperature": 0.0}}
LENGTHS = (25, 50, 100, 200, 300, 400)
TEXTS, KEYS, SECONDS_A_CELL = 1000, 4, 3.0
P = 0.01


def tokens_of(model: str, texts: list[str]) -> tuple[list[list[int]], int]:
    """The texts' tokens, and how many the model has."""
    path = locate(model, load_settings()).path or sys.exit(f"{model} is not on this disk")
    found = []
    for text in texts:
        engine = EngineClient()
        found.append(tokenize_text(engine, path, text, special=False))
        engine.close()
    return [[token.id for token in each.tokens] for each in found], found[0].n_vocab


def cost(n_vocab: int, chain: dict[str, float], scheme: str) -> tuple[float, float]:
    """Mean microseconds a token, plain and marked: half of all tokens need no mark, so a median would tell neither."""
    rows = np.random.default_rng(1).standard_normal((64, n_vocab), dtype=np.float32) * np.float32(3)
    mark = read_watermark(scheme).native("a long secret")
    samplers = [_native.Sampler(n_vocab, watermark=watermark, **chain) for watermark in (None, mark)]  # type: ignore[arg-type]
    spent: list[list[float]] = [[], []]
    ends = time.monotonic() + SECONDS_A_CELL
    while time.monotonic() < ends:
        row = rows[len(spent[0]) % 64].ctypes.data
        for sampler, times in zip(samplers, spent, strict=True):
            start = time.thread_time_ns()
            sampler.sample(row, accept=True)
            times.append((time.thread_time_ns() - start) / 1e3)
    plain, marked = (statistics.fmean(sorted(times)[: len(times) * 9 // 10]) for times in spent)
    return plain, marked


def show_cost() -> None:
    print(f"{'vocabulary':>10}  {'chain':<16}{'scheme':<18}{'plain µs':>9}{'marked µs':>11}")
    for n_vocab in VOCABULARIES:
        for name, chain in CHAINS.items():
            for scheme in SCHEMES:
                plain, marked = cost(n_vocab, chain, scheme)
                print(f"{n_vocab:>10,}  {name:<16}{scheme:<18}{plain:>9.1f}{marked:>11.1f}", flush=True)


def show_chance(model: str, text: str) -> None:
    whole = Path(text).read_text(encoding="utf-8")
    parts = [whole[at : at + 100_000] for at in range(0, len(whole), 100_000)]
    lists, n_vocab = tokens_of(model, parts)
    tokens = [token for part in lists for token in part]
    length = len(tokens) // TEXTS
    texts = [tokens[at : at + length] for at in range(0, length * TEXTS, length)]
    print(f"{TEXTS:,} texts of {length} tokens, {KEYS} keys, found at p < {P}")
    watermark = read_watermark("green")
    for repeats in (False, True):
        shares = []
        for key in range(KEYS):
            found = [find_watermark(watermark, f"key {key}", n_vocab, each, repeats=repeats).p for each in texts]
            shares.append(sum(p < P for p in found) / TEXTS)
        counting = "all n-grams" if repeats else "each n-gram once"
        mean, least, most = statistics.fmean(shares), min(shares), max(shares)
        print(f"{counting:<18}{mean:.2%} of texts, {least:.1%} to {most:.1%} by key", flush=True)


def show_lengths(model: str, scheme: str, key: str, answers: str) -> None:
    rows = [json.loads(line) for line in Path(answers).read_text(encoding="utf-8").splitlines()]
    lists, n_vocab = tokens_of(model, [row["answer"] for row in rows])
    watermark = read_watermark(scheme)
    print(f"{'tokens':>6}{'answers':>9}{'judged':>8}{'median z':>10}{'found at p < 0.01':>20}{'p < 0.0001':>12}")
    for length in LENGTHS:
        found = [find_watermark(watermark, key, n_vocab, each[:length]) for each in lists if len(each) >= length]
        if found:
            z, judged = (statistics.median(values) for values in ([f.z for f in found], [f.judged for f in found]))
            shares = [sum(each.p < p for each in found) / len(found) for p in (P, 1e-4)]
            print(f"{length:>6}{len(found):>9}{judged:>8.0f}{z:>10.1f}{shares[0]:>20.0%}{shares[1]:>12.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("cost")
    for name, arguments in (("chance", ("model", "text")), ("lengths", ("model", "scheme", "key", "answers"))):
        each = commands.add_parser(name)
        for argument in arguments:
            each.add_argument(argument)
    options = vars(parser.parse_args())
    {"cost": show_cost, "chance": show_chance, "lengths": show_lengths}[options.pop("command")](**options)


if __name__ == "__main__":
    main()

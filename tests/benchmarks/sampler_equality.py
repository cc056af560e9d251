"""Compares the native sampler with llama.cpp's chain on many rows of logits. Takes minutes.

    python tests/benchmarks/sampler_equality.py [--rows N] [--orders N] [--model FILE.gguf]

Each parameter set of tests/sampler_cases.py runs as one long sequence over all rows of a vocabulary size, so
that a random generator that went astray would show in the tokens after it. At the end of each chunk of rows
a few of them are taken in the exact way too, after which the generators' states have to be equal. Exits with 1
when anything differs.

Sets for which llama.cpp sorts whole vocabularies see only every 19th row.

Then random orders of the steps, with random parameters, each see a few rows, every other one under a mask.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.sampler_cases import (
    PARAMETERS,
    hard_rows,
    may_draw_another,
    native_sampler,
    random_parameters,
    rows,
    shuffled_order,
)
from support.sampler_llama import LlamaChain

from llmrun import _native
from llmrun.engine.llama.base import Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.protocol.loading import Load
from llmrun.protocol.params import SamplingParams

# Of all rows; the small vocabulary is that of SmolLM2.
SHARES = {49_152: 0.80, 128_256: 0.10, 151_936: 0.06, 262_144: 0.04}
CHUNK = 100
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "1 2 3 4 5 6 7",
    "Once upon a time, in a village by the sea,",
)


def sorts_everything(params: SamplingParams) -> bool:
    by_probability = params.top_p < 1 or params.typical_p < 1 or params.temperature_range > 0
    untruncated = params.top_k <= 0 or params.top_k > 1000
    return bool(params.mirostat) or (untruncated and (by_probability or params.xtc_probability > 0))


class Contest:
    """One parameter set on one vocabulary size."""

    def __init__(self, n_vocab: int, name: str, params: SamplingParams) -> None:
        self.name, self.params, self.n_vocab = name, params, n_vocab
        self.llama = LlamaChain(n_vocab, params, 11)
        self.native = native_sampler(n_vocab, params, 11)

    def play(self, logits: np.ndarray, results: Counter[str]) -> None:
        for row in logits[:: 19 if sorts_everything(self.params) else 1]:
            token, expected = self.native.sample(row.ctypes.data), self.llama.sample(row)
            if token == expected:
                results["equal"] += 1
            elif may_draw_another(self.params, self.n_vocab):
                results["drawn from a list that is not sorted"] += 1
            else:
                results["different"] += 1
                print(f"{self.name}: {token} in place of {expected}", flush=True)
            self.native.accept(expected)
            self.llama.accept(expected)

    def check_states(self, logits: np.ndarray, results: Counter[str]) -> None:
        """A few rows in both ways from the same seed; then the generators have to be in the same state."""
        fast, exact = (native_sampler(self.n_vocab, self.params, 5, exact=exact) for exact in (False, True))
        for row in logits:
            for sampler in (fast, exact):
                sampler.accept(sampler.sample(row.ctypes.data))
        equal = fast.random_state() == exact.random_state()
        results["equal states" if equal else "different"] += 1


def captured_rows(path: str, count: int) -> Iterator[np.ndarray]:
    """Logits of a real model while it writes."""
    model = LlamaModel(path, 0, _native.CancelFlag())
    vocabulary = model.vocabulary
    context = LlamaContext(model, Load(path=path, n_ctx=1024, n_ctx_start=1024, threads=2))
    sampler = native_sampler(vocabulary.n_tokens, SamplingParams(temperature=1.0), 1)
    found: list[np.ndarray] = []
    while count > 0:
        prompt = PROMPTS[count % len(PROMPTS)]
        tokens = vocabulary.with_bos(vocabulary.tokenize(prompt, special=False))
        context.forget(0, 0)
        position = 0
        while position < 900 and count > 0:
            last = len(tokens) - 1
            context.decode([Entry(t, position + i, 0, i == last) for i, t in enumerate(tokens)])
            position += len(tokens)
            address = context.logits(last)
            floats = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            found.append(np.ctypeslib.as_array(floats, (vocabulary.n_tokens,)).copy())
            tokens = [sampler.sample(address)]
            count -= 1
            if len(found) == CHUNK or count == 0:
                yield np.stack(found)
                found = []


def synthetic_rows(n_vocab: int, count: int) -> Iterator[np.ndarray]:
    for seed in range(count // CHUNK):
        yield np.concatenate([rows(n_vocab, CHUNK - 10, seed), hard_rows(n_vocab, seed)])


def compare(n_vocab: int, chunks: Iterator[np.ndarray], results: Counter[str]) -> int:
    contests = [Contest(n_vocab, name, params) for name, params in PARAMETERS.items()]
    count = 0
    for chunk in chunks:
        count += len(chunk)
        for contest in contests:
            contest.play(chunk, results)
            contest.check_states(chunk[:3], results)
        print(f"{n_vocab:,}: {count} rows", file=sys.stderr, flush=True)
    results["whole vocabulary"] += sum(contest.native.exact_count for contest in contests)
    for contest in contests:
        contest.llama.close()
    return count


def play_order(seed: int, results: Counter[str]) -> None:
    """A random order of random steps on a few rows; ours gets a mask where llama.cpp gets -inf."""
    draw, generator = random.Random(seed), np.random.default_rng(seed)
    n_vocab = draw.choice([20, 300, 300, 3000, 3000, 49_152])
    params = replace(random_parameters(draw), mirostat=0, order=shuffled_order(draw))
    native, llama = native_sampler(n_vocab, params, seed), LlamaChain(n_vocab, params, seed)
    for index, row in enumerate(rows(n_vocab, 24 if n_vocab < 10_000 else 6, seed)):
        allowed = generator.random(-(-n_vocab // 32) * 32) < draw.choice([0.05, 0.5, 0.99])
        if index % 2 == 0:
            allowed[:] = True
        allowed[int(row.argmax())] = True
        mask = np.packbits(allowed, bitorder="little").view(np.uint32)
        token = native.sample(row.ctypes.data, mask.ctypes.data if index % 2 else 0)
        expected = llama.sample(np.where(allowed[:n_vocab], row, np.float32(-np.inf)))
        equal = token == expected or may_draw_another(params, n_vocab)
        results["equal in another order" if equal else "different"] += 1
        if not equal:
            print(f"order {seed}, row {index}: {token} in place of {expected}; {params.order}", flush=True)
        native.accept(expected)
        llama.accept(expected)
    llama.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--orders", type=int, default=2_000)
    parser.add_argument("--model", help="SmolLM2, or another model: a fifth of the rows are its logits")
    arguments = parser.parse_args()
    results: Counter[str] = Counter()
    count = 0
    if arguments.model:
        chunks = captured_rows(arguments.model, arguments.rows // 5)
        first = next(chunks)
        count += compare(first.shape[1], iter([first, *chunks]), results)
    for n_vocab, share in SHARES.items():
        wanted = int(arguments.rows * share)
        if n_vocab == min(SHARES):
            wanted -= count
        count += compare(n_vocab, synthetic_rows(n_vocab, wanted), results)
    for seed in range(arguments.orders):
        play_order(seed, results)
    on_all = sum(not sorts_everything(params) for params in PARAMETERS.values())
    print(f"{count} rows x {len(PARAMETERS)} parameter sets, {on_all} of them on every row: {dict(results)}")
    sys.exit(1 if results["different"] else 0)


if __name__ == "__main__":
    main()

"""Microseconds a token of the suffix automaton, and how much memory it takes, at 32k tokens of history.

    python tests/benchmarks/drafts.py [--tokens N]

Text is what a Zipf distribution gives, in which long pieces come again; a second one is a single token repeated, and a
third one all different tokens.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from llmrun._native import SuffixAutomaton

VOCABULARY = 49_152
MORE = 2_000  # tokens that are added one by one, each with a draft
MOST = 15


def histories(count: int) -> dict[str, list[int]]:
    """By kind, so many tokens."""
    generator = np.random.default_rng(1)
    text: list[int] = (generator.zipf(1.2, count) % VOCABULARY).tolist()
    for start in range(1000, count, 1000):
        source = int(generator.integers(0, start - 300))
        text[start : start + 300] = text[source : source + 300]
    return {"text": text[:count], "one token": [7] * count, "different": [i % VOCABULARY for i in range(count)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    count = parser.parse_args().tokens
    print(f"{'history':<12}{'all at once, ms':>17}{'one and a draft, µs':>21}{'after a rewind, ms':>20}")
    for name, tokens in histories(count + MORE).items():
        automaton = SuffixAutomaton()
        began = time.perf_counter()
        automaton.extend(tokens[:count])
        built = time.perf_counter() - began
        began = time.perf_counter()
        for token in tokens[count:]:
            automaton.extend([token])
            automaton.draft(MOST)
        each = (time.perf_counter() - began) / MORE
        automaton.rewind(count)
        began = time.perf_counter()
        automaton.draft(MOST)
        again = time.perf_counter() - began
        print(f"{name:<12}{built * 1e3:>17.2f}{each * 1e6:>21.2f}{again * 1e3:>20.2f}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    many = [SuffixAutomaton() for _ in range(20)]
    tokens = histories(count)["text"]
    for automaton in many:
        automaton.extend(tokens)
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / len(many)
    print(f"memory: {taken / count:.0f} bytes a token")


if __name__ == "__main__":
    main()

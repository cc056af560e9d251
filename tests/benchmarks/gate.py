"""The speed of speculative decoding relative to plain decoding: twelve kinds of text, step times of several machines.

    python tests/benchmarks/gate.py [--tokens 300] [--seeds 3]

The loop and the gate are llmrun's own, the model follows a text, and a machine's table says how long its steps take.
Columns: one answer and eight at the same time, each with drafts from the text, then with prediction heads too; of
several seeds the slowest. The last line is the floor. `measured` is one answer with heads that knows the machine's own
times from the beginning.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.draft_simulation import MACHINES, TEXTS, Machine, simulate

COLUMNS = ("1", "1 heads", "8", "8 heads", "measured")


def speeds(kind: str, machine: Machine, n_tokens: int, seed: int) -> list[float]:
    found = [
        simulate(kind, machine, n_tokens=n_tokens, clients=clients, heads=heads, seed=seed).speed
        for clients in (1, 8)
        for heads in (False, True)
    ]
    known = simulate(kind, machine, n_tokens=n_tokens, heads=True, seed=seed, begins=machine.measured)
    return [*found, known.speed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(" " * 10 + "".join(f"{machine.name:>{len(COLUMNS) * 10}}" for machine in MACHINES))
    print(" " * 10 + "".join(f"{name:>10}" for name in COLUMNS) * len(MACHINES))
    floor = [float("inf")] * len(COLUMNS) * len(MACHINES)
    for kind in TEXTS:
        row = list[float]()
        for machine in MACHINES:
            tried = [speeds(kind, machine, options.tokens, seed) for seed in range(options.seeds)]
            row += map(min, *tried) if len(tried) > 1 else tried[0]
        floor = [*map(min, floor, row)]
        print(f"{kind:<10}" + "".join(f"{each:>10.3f}" for each in row), flush=True)
    print(f"{'floor':<10}" + "".join(f"{each:>10.3f}" for each in floor))


if __name__ == "__main__":
    main()

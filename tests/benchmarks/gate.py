"""The speed of speculative decoding relative to plain decoding: twelve kinds of text, step tables of three machines.

    python tests/benchmarks/gate.py [--tokens 300] [--seeds 3] [--agent]

The loop and the gate are llmrun's own, the model follows a text, and a machine's table says how long its steps take.
Columns: one answer and eight at the same time, each with drafts from the text, then with prediction heads too; of
several seeds the slowest. The last line is the floor. `off 10 %` is one answer with heads where the table that drafts
are planned by says that wide steps cost 10 % less than they do.

--agent replays an agent's session with edits instead: tokens a step, with drafts from earlier requests and without, and
the accepted tokens by what drafted them.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.draft_simulation import MACHINES, TEXTS, Machine, replay, simulate

COLUMNS = ("1", "1 heads", "8", "8 heads", "off 10 %")


def speeds(kind: str, machine: Machine, n_tokens: int, seed: int) -> list[float]:
    found = [
        simulate(kind, machine, n_tokens=n_tokens, clients=clients, heads=heads, seed=seed).speed
        for clients in (1, 8)
        for heads in (False, True)
    ]
    cheap = machine._replace(steps={width: each * (0.9 if width > 1 else 1) for width, each in machine.steps.items()})
    return [*found, simulate(kind, machine, n_tokens=n_tokens, heads=True, seed=seed, believed=cheap).speed]


def show_session() -> None:
    for machine in MACHINES:
        print(f"{machine.name:<28}{'tokens a step':>16}{'alone':>8}{'speed':>8}{'alone':>8}   accepted, by source")
        answers = list(zip(replay(machine), replay(machine, earlier=False), strict=True))
        for what in [*dict.fromkeys(found.what for found, _ in answers), "all"]:
            pairs = [pair for pair in answers if what in (pair[0].what, "all")]
            rates = [sum(a.n_tokens for a in side) / sum(a.n_steps for a in side) for side in zip(*pairs, strict=True)]
            speeds = [
                sum(a.n_tokens for a in side) / sum(a.n_tokens / a.speed for a in side)
                for side in zip(*pairs, strict=True)
            ]
            accepted = sum((found.accepted for found, _ in pairs), Counter[str]())
            print(f"  {what:<26}{rates[0]:>16.2f}{rates[1]:>8.2f}{speeds[0]:>8.2f}{speeds[1]:>8.2f}   {dict(accepted)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--agent", action="store_true", help="replay an agent's session")
    options = parser.parse_args()
    if options.agent:
        show_session()
        return
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

"""What `llmrun tune` finds in a minute, beside an exhaustive sweep over the same settings.

    python tests/benchmarks/tune.py [MODEL.gguf] [--seconds 60] [--rounds 6] [--without NAME,...]

Without a model, one of Llama-3.2-1B's shape is made with random weights as Q4_K_M in a temporary folder (800 MB). After
tuning, every combination is measured once; then the fastest three, what tuning found and the default take turns. Of the
settings one goal does not depend on, only the default is swept. Without other load all takes three minutes; with some,
threads are not tuned, so they are not swept either.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import peers
from random_model import Shape, write_model

from llmrun.bench.statistics import Verdict, compare
from llmrun.bench.tune.axes import DECODE, PREFILL, Axis, axes_for
from llmrun.bench.tune.measure import EngineBackend
from llmrun.bench.tune.search import SearchResult, search
from llmrun.gguf.reader import read_header
from llmrun.planning.hardware import probe
from llmrun.planning.plan import LoadPreferences, make_plan
from llmrun.planning.settings import EngineSettings
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.ui.views.tune import line_of, times

LLAMA_1B = Shape(2048, 16, 8192, 32, 8, 64, 128_256, tied=True)
SHARE, SECONDS = 0.97, 60.0
_FINALISTS = 3
_MORE_BITS = {"token_embd.weight", "attn_v.weight"}


def one_billion(path: Path) -> Path:
    """Llama-3.2-1B's shape; Q4_K_M gives every other down projection more bits, too."""
    downs = itertools.count()

    def kind(name: str) -> str:
        more = next(downs) % 2 if name == "ffn_down.weight" else name in _MORE_BITS
        return "Q6_K" if more else "Q4_K"

    return write_model(path, LLAMA_1B, kind, n_ctx=8192)


def combinations(default: EngineSettings, axes: Sequence[Axis], goal: str) -> list[EngineSettings]:
    """Every combination of the values that this goal depends on; neighbours need the same engine."""
    loading_first = sorted((axis for axis in axes if goal in axis.goals), key=lambda axis: "threads" in axis.name)
    found = dict.fromkeys(
        replace(default, **dict(itertools.chain(*changes)))
        for changes in itertools.product(*(((), *axis.changes) for axis in loading_first))
    )
    return list(found)


def sweep(
    machine: EngineBackend, default: EngineSettings, axes: Sequence[Axis], tests: Mapping[str, BenchTest]
) -> Iterator[tuple[str, EngineSettings, float]]:
    """Goal, settings and tokens/s of everything, measured once."""
    for goal, test in tests.items():
        for settings in combinations(default, axes, goal):
            yield goal, settings, max(machine.rates(settings, test, 2))


def take_turns(
    machine: EngineBackend, everyone: Sequence[EngineSettings], test: BenchTest, rounds: int
) -> dict[EngineSettings, list[float]]:
    """Tokens/s of each in each round."""
    rates: dict[EngineSettings, list[float]] = {settings: [] for settings in everyone}
    for number in range(rounds):
        for settings in everyone if number % 2 == 0 else everyone[::-1]:
            rates[settings].append(max(machine.rates(settings, test, 2)))
    return rates


def best_profile(found: SearchResult, goal: str) -> EngineSettings:
    """What would be chosen if nothing but this goal counted."""
    profiles = (found.tuned.default, *found.tuned.others)
    return max(profiles, key=lambda each: each.prefill_rate if goal == PREFILL else each.decode_rate).settings


def final(
    machine: EngineBackend, goal: str, found: SearchResult, swept: Mapping[EngineSettings, float], rounds: int
) -> tuple[Verdict, Verdict]:
    """What tuning found beside the best of the sweep, and beside the default."""
    test = {PREFILL: found.prefill_test, DECODE: found.decode_test}[goal]
    default, chosen = found.tuned.default.settings, best_profile(found, goal)
    fastest = sorted(swept, key=lambda settings: -swept[settings])[:_FINALISTS]
    rates = take_turns(machine, list(dict.fromkeys([default, chosen, *fastest])), test, rounds)
    best = max(fastest, key=lambda settings: sum(rates[settings]))
    print(
        f"\n{goal} ({test.name}): best of {len(swept)}: {', '.join(best.changes(default)) or 'default'}; "
        f"tuned: {', '.join(chosen.changes(default)) or 'default'}"
    )
    return compare(rates[best], rates[chosen], paired=True), compare(rates[default], rates[chosen], paired=True)


def run(path: Path, options: argparse.Namespace) -> bool:
    """Measure and print; whether all bounds hold."""
    header, hardware = read_header(path), probe()
    load = make_plan(header, hardware, LoadPreferences()).load(header.path)
    default = EngineSettings.of(load)
    axes = [axis for axis in axes_for(header, hardware, default) if axis.name not in options.without.split(",")]
    with EngineBackend(load, hardware.memory_available // 2, header.weight_bytes) as machine:
        began = time.monotonic()
        found = search(machine, default, axes, seconds=options.seconds, on_step=lambda step: None)
        took = time.monotonic() - began
        for tried in found.tried:
            print(line_of(tried))
        busy = {"threads", "batch threads", "waiting"} if any(each.verdict == "busy" for each in found.tried) else set()
        swept: dict[str, dict[EngineSettings, float]] = {PREFILL: {}, DECODE: {}}
        tests = {PREFILL: found.prefill_test, DECODE: found.decode_test}
        for goal, settings, rate in sweep(machine, default, [axis for axis in axes if axis.name not in busy], tests):
            swept[goal][settings] = rate
        held = [peers.verdict("seconds of tuning", took, SECONDS, at_most=True)]
        for goal in tests:
            beside_best, beside_default = final(machine, goal, found, swept[goal], options.rounds)
            print(f"  tuned / best of the sweep  {times(beside_best)}")
            print(f"  tuned / default            {times(beside_default)}")
            held.append(peers.verdict("tuned / best of the sweep", beside_best.ratio, SHARE, at_most=False))
            held.append(peers.verdict("tuned / default", beside_default.high, 1.0, at_most=False))
    print(f"\ngain of {path.name}: prefill ×{found.tuned.prefill_gain:.2f}, decode ×{found.tuned.decode_gain:.2f}")
    return all(held)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--without", default="", help="axes that are not tuned and not swept, e.g. 'huge pages,waiting'"
    )
    options = parser.parse_args()
    peers.warn_if_busy()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if run(options.model or one_billion(Path(folder, "1B-Q4_K_M.gguf")), options) else 1


if __name__ == "__main__":
    sys.exit(main())

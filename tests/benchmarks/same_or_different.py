"""How often `llmrun bench --compare` and `--vs` are wrong, and how often they are right.

    python tests/benchmarks/same_or_different.py [MODEL.gguf] [--runs 1000] [--sets 24]

Simulated: both sides are the same, and "different" is a false alarm; then B is 5 % slower, and "slower" is right. Once
measured in turns (A B B A ...), as --vs and interleaved models are, once one after the other, as two files are. With a
MODEL, the same question to real samples of it: the same engine twice, in turns, and two starts one after the other.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from llmrun import statistics
from llmrun.lab.bench import machine
from llmrun.statistics import Verdict, compare

SLOWER = 0.05
Series = list[float]


def steady(length: int, spread: float) -> Series:
    """Normal noise and nothing else."""
    return [random.gauss(0, spread) for _ in range(length)]


def skewed(length: int, spread: float) -> Series:
    """Log-normal time: sometimes slower, never much faster."""
    return [-spread * (random.lognormvariate(0, 0.7) - math.exp(0.245)) for _ in range(length)]


def heavy(length: int, spread: float) -> Series:
    """Student's t with 3 degrees of freedom: now and then far off."""
    chi = [sum(random.gauss(0, 1) ** 2 for _ in range(3)) for _ in range(length)]
    return [0.6 * spread * random.gauss(0, 1) / math.sqrt(each / 3) for each in chi]


def bursts(length: int, spread: float) -> Series:
    """Something else runs for three repetitions in a row and takes 15 % away, on average."""
    values, start = steady(length, spread), random.randrange(length)
    for index in range(start, min(start + 3, length)):
        values[index] -= random.expovariate(1 / 0.15)
    return values


def warming(length: int, spread: float) -> Series:
    """The machine gets up to 5 % slower all the time."""
    slope = 0.05 * random.random() / length
    return [value - slope * index for index, value in enumerate(steady(length, spread))]


def wandering(length: int, spread: float) -> Series:
    """A random walk, half as long in each step as the noise is wide."""
    level, values = 0.0, []
    for value in steady(length, spread):
        level += random.gauss(0, spread / 2)
        values.append(level + value)
    return values


def throttling(length: int, spread: float) -> Series:
    """From some moment on the clock is 10 % slower."""
    values, start = steady(length, spread), random.randrange(length)
    return [value - (0.1 if index >= start else 0) for index, value in enumerate(values)]


MODELS: dict[str, Callable[[int, float], Series]] = {
    "normal": steady,
    "log-normal": skewed,
    "heavy tails": heavy,
    "bursts of load": bursts,
    "slow drift": warming,
    "random walk": wandering,
    "throttled once": throttling,
    "normal, starts differ by 1 %": steady,
}


def in_turns(series: Series) -> tuple[Series, Series]:
    """A B B A A B ...: who was measured when."""
    a, b = [], []
    for pair in range(len(series) // 2):
        first, second = series[2 * pair : 2 * pair + 2]
        a.append(second if pair % 2 else first)
        b.append(first if pair % 2 else second)
    return a, b


def simulate(model: str, repetitions: int, spread: float, *, paired: bool, slower: float) -> Verdict:
    """One comparison. What all samples of one start share hits only sets that are measured apart."""
    series = MODELS[model](2 * repetitions, spread)
    a, b = in_turns(series) if paired else (series[:repetitions], series[repetitions:])
    if "starts" in model and not paired:
        a, b = (
            [value + shift for value in side]
            for side, shift in ((a, random.gauss(0, 0.01)), (b, random.gauss(0, 0.01)))
        )
    return compare([math.exp(x) for x in a], [math.exp(x) / (1 + slower) for x in b], paired=paired)


def share(verdicts: Sequence[Verdict], kinds: set[str]) -> str:
    """In percent."""
    return f"{sum(verdict.kind in kinds for verdict in verdicts) / len(verdicts):7.1%}"


def simulated(runs: int) -> None:
    """The table of false alarms and of slowdowns that were found."""
    print(f"simulated, {runs} runs each: false alarms / a {SLOWER:.0%} slowdown found")
    columns = [
        (paired, repetitions, spread) for paired in (True, False) for repetitions in (5, 10) for spread in (0.01, 0.015)
    ]
    print(f"{'':30}" + "".join(f"{'turns' if p else 'apart'} {n:2} ± {s:.1%}   " for p, n, s in columns))
    worst: dict[tuple[bool, int, float], int] = {}
    for model in MODELS:
        cells = []
        for column in columns:
            paired, repetitions, spread = column
            same = [simulate(model, repetitions, spread, paired=paired, slower=0) for _ in range(runs)]
            slow = [simulate(model, repetitions, spread, paired=paired, slower=SLOWER) for _ in range(runs)]
            cells.append(f"{share(same, {'faster', 'slower'})} /{share(slow, {'slower'})}")
            worst[column] = worst.get(column, 0) + sum(verdict.is_different for verdict in same)
        print(f"{model:30}" + "  ".join(cells), flush=True)
    totals = [f"{worst[column] / runs / len(MODELS):7.1%}         " for column in columns]
    print(f"{'all, false alarms':30}" + "  ".join(totals))


# ---- real samples ----------------------------------------------------------------------------------


def engine() -> object:
    """A new one."""
    from llmrun.runner.client import EngineClient
    from llmrun.runner.launch import launch

    return EngineClient(launch())


def measured(runner: object, path: Path, test: object, repetitions: int, *, warm_up: bool = False) -> Iterator[float]:
    """Tokens/s of each repetition."""
    from llmrun.lab.bench.cases import bench_settings
    from llmrun.protocol.jobs.bench import BENCH, Bench
    from llmrun.protocol.loading import Load

    command = Bench(Load.of(bench_settings(threads=1), str(path), n_ctx=0), test, repetitions, warm_up)
    for repetition in runner.do(BENCH, command).repetitions:
        yield test.n_tokens / repetition.ns * 1e9


def real(path: Path, sets: int) -> None:
    """The same model against itself."""
    from llmrun.protocol.jobs.bench import BenchTest

    tests = (BenchTest(n_prompt=16), BenchTest(n_gen=8))
    began = time.monotonic()
    runner = engine()
    found = []
    for number in range(sets):
        test = tests[number % 2]
        list(measured(runner, path, test, 1, warm_up=True))
        series = [rate for _ in range(10) for rate in measured(runner, path, test, 1)]
        found.append(compare(*in_turns(series), paired=True))
    runner.close()
    tell(f"real, in turns, {sets} sets of 5 pairs", found, time.monotonic() - began)
    began, found, runs = time.monotonic(), [], []
    for number in range(sets + 2):
        runner = engine()
        list(measured(runner, path, tests[number % 2], 1, warm_up=True))
        with machine.DisturbanceMonitor() as watch:
            rates = list(measured(runner, path, tests[number % 2], 5))
        runner.close()
        runs.append((rates, bool(watch.warnings)))
    for (a, load_a), (b, load_b) in zip(runs, runs[2:], strict=False):  # the next start with the same test
        between = statistics.DISTURBED if load_a or load_b else statistics.BETWEEN
        found.append(compare(a, b, between=between))
    tell(f"real, apart, {sets} sets of 5 and 5", found, time.monotonic() - began)
    print(f"  of {len(runs)} starts, {sum(disturbed for _, disturbed in runs)} were disturbed by other programs")


def tell(title: str, found: Sequence[Verdict], seconds: float) -> None:
    """One line."""
    kinds = ", ".join(
        f"{sum(each.kind == kind for each in found)} {kind}" for kind in ("faster", "slower", "same", "noisy")
    )
    print(f"{title}: false alarms {share(found, {'faster', 'slower'}).strip()} ({kinds}; {seconds:.0f} s)", flush=True)


def main() -> None:
    """Read the arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--runs", type=int, default=1000, help="0: no simulation")
    parser.add_argument("--sets", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    if arguments.runs:
        simulated(arguments.runs)
    if arguments.model:
        real(arguments.model, arguments.sets)


if __name__ == "__main__":
    sys.exit(main())

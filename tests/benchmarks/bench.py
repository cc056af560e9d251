"""Our pp and tg beside llama-bench's: the same file, threads and tests, in turns, as ratios.

    python tests/benchmarks/bench.py --llama-bench PATH [--threads 1,2] [--pairs 5] [-p 512] [-n 128] FILE.gguf...

llama-bench has to be built of the llama.cpp that llama-cpp-python has. Our engine takes the libraries that lie beside
it: two builds of one source differ by percents, which is not what is asked (--own-library takes ours all the same).
The commit of ggml is printed for each. Both get our engine's environment (GOMP_SPINCOUNT), with which waiting threads
leave the processor to others, so that a busy machine disturbs both alike. In every pair each program measures once,
after a warm-up, and who is first changes from pair to pair. Bound: every median ratio within 2 % of 1.

First of all comes what our loop adds to a token: the quickest of many answers of a model that computes nothing to speak
of, ours and theirs. That figure is the same on a busy machine, where ratios of seconds are not worth much.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from support.gguf_writer import runnable_model, write

from llmrun.protocol.jobs.bench import BENCH, Bench, BenchTest
from llmrun.protocol.loading import Load
from llmrun.runner.launch import launch
from llmrun.runner.runner import Runner

BOUND = 0.02
SPINS = {"GOMP_SPINCOUNT": "8000"}  # as engine.environment.set_environment() has it


def theirs(program: Path, model: Path, test: BenchTest, threads: int) -> tuple[float, str]:
    """Tokens/s by llama-bench, and its commit."""
    command = [program, "-m", model, "-t", str(threads), "-r", "1", "-o", "json"]
    command += ["-p", str(test.n_prompt), "-n", str(test.n_gen), "-d", str(test.n_depth)]
    environment = {**os.environ, **SPINS, "LD_LIBRARY_PATH": str(program.parent)}
    done = subprocess.run(list(map(str, command)), capture_output=True, check=True, env=environment)
    (row,) = json.loads(done.stdout)
    return row["avg_ts"], row["build_commit"]


def ours(runner: Runner, model: Path, test: BenchTest, threads: int) -> tuple[float, str]:
    """Tokens/s by us, and ggml's commit."""
    load = Load(str(model), n_ctx=0, n_ctx_start=0, n_batch=2048, threads=threads)
    done = runner.do(BENCH, Bench(load, test, repetitions=1))
    return 1e9 * test.n_tokens / done.repetitions[0].ns, done.model.build_commit


def overhead(program: Path, runner: Runner, folder: Path) -> float:
    """Nanoseconds that we take longer for a token than llama-bench, at best."""
    model = write(folder / "tiny.gguf", runnable_model())
    test, repetitions, rounds = BenchTest(n_gen=48), 20, 5
    load = Load(str(model), n_ctx=0, n_ctx_start=0, n_batch=2048, threads=1)
    command = [str(program), "-m", str(model), "-t", "1", "-p", "0", "-n", "48", "-r", str(repetitions), "-o", "json"]
    environment = {**os.environ, **SPINS, "LD_LIBRARY_PATH": str(program.parent)}
    our, their = [], []
    for _ in range(rounds):
        our += [each.ns for each in runner.do(BENCH, Bench(load, test, repetitions)).repetitions]
        done = subprocess.run(command, capture_output=True, check=True, env=environment)
        their += json.loads(done.stdout)[0]["samples_ns"]
    print(f"a token of a tiny model: ours {min(our) / 48:,.0f} ns, theirs {min(their) / 48:,.0f} ns")
    return (min(our) - min(their)) / 48


def measure(
    program: Path, runner: Runner, model: Path, test: BenchTest, threads: int, pairs: int
) -> list[tuple[float, float]]:
    """Ours and theirs, of every pair."""
    found = []
    for pair in range(pairs):
        if pair % 2:
            their, _ = theirs(program, model, test, threads)
            our, _ = ours(runner, model, test, threads)
        else:
            our, _ = ours(runner, model, test, threads)
            their, _ = theirs(program, model, test, threads)
        found.append((our, their))
        print(f"    {our:10.2f} {their:10.2f}  {our / their:.3f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", type=lambda text: Path(text).absolute())
    parser.add_argument("--llama-bench", required=True, type=lambda text: Path(text).absolute())
    parser.add_argument("--own-library", action="store_true")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("-p", type=int, default=512)
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("-d", type=int, default=0)
    arguments = parser.parse_args()
    outside = 0
    beside = {} if arguments.own_library else {"LLAMA_CPP_LIB_PATH": str(arguments.llama_bench.parent)}
    runner = Runner(launch(environment=beside))
    first = arguments.models[0]
    tiny = BenchTest(n_prompt=1)
    print("ggml: ours", ours(runner, first, tiny, 1)[1], "theirs", theirs(arguments.llama_bench, first, tiny, 1)[1])
    with tempfile.TemporaryDirectory() as folder:
        print(f"our loop adds {overhead(arguments.llama_bench, runner, Path(folder)):,.0f} ns to a token", flush=True)
    tests = [BenchTest(n_prompt=arguments.p, n_depth=arguments.d), BenchTest(n_gen=arguments.n, n_depth=arguments.d)]
    for model in arguments.models:
        for threads in map(int, arguments.threads.split(",")):
            for test in (test for test in tests if test.n_tokens):
                print(f"{model.name}, {threads} threads, {test.name}: ours, theirs, ratio")
                found = measure(arguments.llama_bench, runner, model, test, threads, arguments.pairs)
                ratios = [our / their for our, their in found]
                median, best = (
                    statistics.median(ratios),
                    max(our for our, _ in found) / max(their for _, their in found),
                )
                outside += abs(median - 1) > BOUND
                spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
                print(f"  median {median:.3f}  ({spread}); best against best {best:.3f}", flush=True)
    runner.close()
    print("all medians within 2 %" if not outside else f"{outside} medians are not within 2 %")
    sys.exit(bool(outside))


if __name__ == "__main__":
    main()

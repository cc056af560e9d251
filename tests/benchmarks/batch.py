"""`llmrun batch` beside one row after another; and killed at random moments, with a disk that is full now and then.

    python tests/benchmarks/batch.py [--rows 2000] [--alone 100] [--kills 100] [--full 10] [--model smollm2]
    python tests/benchmarks/batch.py --ray 500

First, in turns: rows/s and tokens/s of as many rows side by side as llmrun chooses, and of one after another. The rows
are short questions behind the same instructions. Then the batch is killed --kills times (SIGKILL, to the whole process
group), gets a full disk --full times, each at a random moment, and resumes; the output counts lost and repeated rows,
and greedy answers equal to those of an undisturbed run. Run it on a machine that
does nothing else.

With --ray: N rows on a Ray cluster of two nodes on this machine, each with half of its cores, in turns with one
engine that has them all, timed from when the engines are loaded. Then again, while the process of one node's engine is
killed and later the other node.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import peers
import psutil

INSTRUCTIONS = (
    "You are given two numbers. Answer with one short sentence that compares them, without any explanation. Do not "
    "greet, do not apologise, and do not repeat the question. The numbers are {a} and {b}."
)
LOAD_SECONDS = 2.5  # of a run before the first rows that run side by side are answered, about


def command(model: str, rows: Path, out: Path, *more: str) -> list[str]:
    prompt = ("--prompt", INSTRUCTIONS, "--temp", "0", "--max-tokens", "32")  # the last one of an option counts
    return [sys.executable, "-m", "llmrun", "batch", model, str(rows), "-o", str(out), *prompt, *more]


def write_rows(path: Path, count: int) -> Path:
    numbers = random.Random(1)
    lines = [f"{numbers.randrange(10_000)},{numbers.randrange(10_000)}" for _ in range(count)]
    path.write_text("a,b\n" + "\n".join(lines) + "\n")
    return path


def answers(out: Path) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for line in out.read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["row"], []).append(row["answer"])
    return found


def measured(model: str, rows: Path, out: Path, *more: str) -> dict[str, Any]:
    out.unlink(missing_ok=True)
    done = subprocess.run(command(model, rows, out, "--json", *more), capture_output=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def compare(model: str, folder: Path, n_rows: int, n_alone: int, turns: int) -> None:
    many, few = write_rows(folder / "many.csv", n_rows), write_rows(folder / "few.csv", n_alone)
    ratios = []
    for turn in range(turns):
        alone = measured(model, few, folder / "few.jsonl", "-np", "1")
        together = measured(model, many, folder / "many.jsonl")
        rates = [facts["done"] / facts["seconds"] for facts in (together, alone)]
        ratios.append(rates[0] / rates[1])
        speeds = [
            f"{rate:.2f} rows/s, {facts['tokens_per_second']:.0f} t/s"
            for rate, facts in zip(rates, (together, alone), strict=True)
        ]
        print(f"turn {turn + 1}: {together['parallel']} side by side {speeds[0]}; alone {speeds[1]}: {ratios[-1]:.2f}x")
    report = peers.Report()
    report.add("rows/s side by side / one after another", ratios, "x", "ratio")
    report.finish()
    bound(model)


def bound(model: str) -> None:
    """Print the upper bound of rows side by side: a step of N rows costs at least N tokens of a prompt."""
    bench = f"-m llmrun bench {model} -p 512 -n 64 -r 3 --no-limits --json"
    rows = json.loads(subprocess.run([sys.executable, *bench.split()], capture_output=True, check=True).stdout)
    prompt, answer = (row["avg_ts"] for row in rows)
    print(f"tokens/s of a prompt {prompt:.0f}, of an answer alone {answer:.0f}: {prompt / answer:.2f}x")


def disturb(model: str, folder: Path, n_rows: int, kills: int, full: int, *more: str) -> None:
    rows, out = write_rows(folder / "rows.csv", n_rows), folder / "killed.jsonl"
    seconds = measured(model, rows, folder / "calm.jsonl", *more)["seconds"]
    most_seconds = LOAD_SECONDS + 2 * seconds / (kills + full)  # so that the last ones find rows to do
    calm = answers(folder / "calm.jsonl")
    moments = random.Random(2)
    out.unlink(missing_ok=True)
    disturbances = ["kill"] * kills + ["full"] * full
    moments.shuffle(disturbances)
    in_time = 0
    for kind in disturbances:
        in_time += not out.exists() or out.read_bytes().count(b"\n") < n_rows
        most = out.stat().st_size + moments.randrange(1, 2000) if out.exists() and kind == "full" else None

        def limit(most: int | None = most) -> None:
            if most is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

        running = subprocess.Popen(
            command(model, rows, out, *more),
            preexec_fn=limit,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        if most is None:
            time.sleep(moments.uniform(0.2, most_seconds))
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    before = out.read_bytes().count(b"\n")
    subprocess.run(command(model, rows, out, *more), check=True, stderr=subprocess.DEVNULL)
    found = answers(out)
    counts = Counter(len(lines) for lines in found.values())
    lost = n_rows - len(found)
    same = sum(lines[0] == calm[row][0] for row, lines in found.items())
    twice = sum(counts.values()) - counts[1]
    print(
        f"{in_time} of {kills} kills and {full} full disks before all was done: {lost} rows lost, {twice} twice;",
        end="",
    )
    print(f" {before} of {n_rows} rows were done before the last run")
    print(f"greedy answers equal to those of the undisturbed run: {same} of {n_rows}")


def on_ray(model: str, folder: Path, n_rows: int, turns: int) -> None:
    from ray.cluster_utils import Cluster

    short = ("--max-tokens", "8")
    rows, out, half = write_rows(folder / "rows.csv", n_rows), folder / "out.jsonl", max((os.cpu_count() or 2) // 2, 1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": half})
    second = cluster.add_node(num_cpus=half)
    try:
        ratios = []
        for turn in range(turns):
            alone = measured(model, rows, out, *short)["seconds"]
            nodes = measured(model, rows, out, *short, "--ray", cluster.address)["seconds"]
            ratios.append(nodes / alone)
            print(f"turn {turn + 1}: two nodes {nodes:.1f} s, one engine {alone:.1f} s: {ratios[-1]:.3f}", flush=True)
        print(f"median {sorted(ratios)[len(ratios) // 2]:.3f}", flush=True)
        out.unlink()
        running = subprocess.Popen(command(model, rows, out, *short, "--ray", cluster.address))
        wait_for_rows(out, n_rows // 5)
        processes = psutil.process_iter(["cmdline"])
        next(each for each in processes if " ".join(each.info["cmdline"] or ()).startswith("ray::NodeEngine")).kill()
        wait_for_rows(out, n_rows // 2)
        cluster.remove_node(second, allow_graceful=False)
        status = running.wait()
        counts = Counter(len(lines) for lines in answers(out).values())
        print(f"an engine and a node killed: exit status {status}, rows by how many lines they have: {dict(counts)}")
    finally:
        cluster.shutdown()


def wait_for_rows(out: Path, count: int) -> None:
    while not out.exists() or out.read_bytes().count(b"\n") < count:
        time.sleep(0.1)


def main() -> None:
    options = argparse.ArgumentParser()
    for name, value in (("rows", 2000), ("alone", 100), ("kills", 100), ("full", 10)):
        options.add_argument(f"--{name}", type=int, default=value)
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--ray", type=int, metavar="ROWS")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if chosen.ray is not None:
            on_ray(chosen.model, Path(name), chosen.ray, chosen.turns)
            return
        if chosen.alone:
            compare(chosen.model, Path(name), chosen.rows, chosen.alone, chosen.turns)
        if chosen.kills or chosen.full:
            for more in ((), ("-np", "1")):
                disturb(chosen.model, Path(name), chosen.rows, chosen.kills, chosen.full, *more, "--max-tokens", "8")


if __name__ == "__main__":
    main()

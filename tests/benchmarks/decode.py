"""Decode speed while streaming to a terminal, beside llama-completion on one, and beside llama-bench's tg.

    python tests/benchmarks/decode.py [--llama-completion PATH] [--llama-bench PATH] [--runs 5] [--max-tokens 256]

They take turns with the same file and threads. The figures of llmrun and llama-completion are read from what they
print, llama-completion's from its whole time without that of the prompt, for its "eval time" leaves sampling out.
Beside llmrun's stands what a watch at the pseudo-terminal says, from the first live line to the last. A run with --json
gives the time per token outside llama_decode. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import peers
import pexpect

SUMMARY = re.compile(r"decode [\d,]+ tokens ([\d.,]+) t/s")
TIME = re.compile(r"(prompt eval|total) time = *([\d.]+) ms")
RUNS = re.compile(r" eval time = .*/ *(\d+) runs")
LIVE = re.compile(r"decode [\d.,]+ t/s .* ctx ([\d,]+)/")
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[78DM])")


class Decoded(NamedTuple):
    """Tokens/s of one answer, reported by llmrun and timed at the terminal."""

    reported: float
    seen: float


def on_a_terminal(command: list[str]) -> Decoded:
    """One answer, streamed to a pseudo-terminal with its live line."""
    terminal = opened(command)
    text = ""
    live: list[tuple[float, int]] = []  # time of a live line, and its tokens in the context
    while True:
        try:
            piece = terminal.read_nonblocking(1 << 16).decode("utf-8", "replace")
        except pexpect.EOF:
            break
        text += piece
        if found := LIVE.findall(piece):
            live.append((time.perf_counter(), number(found[-1])))
    terminal.close()
    plain = ESCAPES.sub("", text)
    reported = SUMMARY.search(plain)
    if terminal.exitstatus != 0 or reported is None or len(live) < 2:
        sys.exit(f"llmrun failed, or its answer is too short: {plain[-500:]}")
    (began, first), (ended, last) = live[0], live[-1]
    return Decoded(float(reported[1].replace(",", "")), (last - first) / (ended - began))


def llama_completion(command: list[str]) -> float:
    """Tokens/s of one answer, streamed to a pseudo-terminal."""
    terminal = opened(command)
    text = terminal.read().decode("utf-8", "replace")
    times, runs = dict(TIME.findall(text)), RUNS.findall(text)
    if len(times) < 2 or not runs:
        sys.exit(f"llama-completion failed: {text[-500:]}")
    return 1000 * int(runs[-1]) / (float(times["total"]) - float(times["prompt eval"]))


def opened(command: list[str]) -> pexpect.spawn:
    """A program on a pseudo-terminal of a usual size."""
    return pexpect.spawn(command[0], command[1:], dimensions=(50, 120), timeout=600)


def number(text: str) -> int:
    """A whole number with commas."""
    return int(text.replace(",", ""))


def overhead(command: list[str]) -> float:
    """Microseconds a token outside llama_decode, of one answer."""
    done = subprocess.run([*command, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    finished = json.loads(done.stdout.splitlines()[-1])
    return float(finished["stats"]["overhead_seconds"]) * 1e6


def llama_bench(command: list[str]) -> float:
    """Tokens/s of one llama-bench run."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return float(json.loads(done.stdout)[0]["avg_ts"])


def main() -> int:
    """Measure and print."""
    parser = peers.parser(__doc__)
    parser.add_argument("--llama-completion", metavar="PATH", help="default: on PATH")
    parser.add_argument("--llama-bench", metavar="PATH", help="default: on PATH")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompt", default="Write the numbers from 1 to 1000 in words, one a line.")
    parser.add_argument("--greedy", action="store_true", help="temperature 0, not the default sampling with seed 1")
    options = parser.parse_args()
    llmrun = peers.find_llmrun(options.llmrun)
    path = peers.model_file(llmrun, options.model)
    tokens, threads = str(options.max_tokens), str(options.threads or peers.cores())
    ours = [llmrun, "run", options.model, options.prompt, "-n", tokens, "-t", threads, "--speculate", "off"]
    chosen = ["--temp", "0"] if options.greedy else ["--seed", "1"]
    ours += chosen
    completion = [peers.find_tool("llama-completion", options.llama_completion), "-m", path, "-p", options.prompt]
    completion += ["-n", tokens, "-t", threads, "-c", "8192", "-st", "--jinja", *chosen]
    bench = [peers.find_tool("llama-bench", options.llama_bench), "-m", path, "-t", threads]
    bench += ["-p", "0", "-n", tokens, "-r", "1", "-o", "json"]
    peers.warn_if_busy()
    results = peers.take_turns(
        options.runs,
        {
            "llmrun": lambda: on_a_terminal([*ours, "--stats"]),
            "llama-completion": lambda: llama_completion(completion),
            "llama-bench": lambda: llama_bench(bench),
            "overhead": lambda: overhead(ours),
        },
    )
    reported, seen = zip(*results["llmrun"], strict=True)
    report = peers.Report()
    report.add("decode on a terminal, reported", reported, "t/s")
    report.add("decode on a terminal, timed", seen, "t/s")
    report.add("time per token outside llama_decode", results["overhead"], "µs")
    report.bound("overhead in µs", statistics.median(results["overhead"]), 100, at_most=True)
    for peer, bound in (("llama-completion", 0.98), ("llama-bench", 0.97)):
        report.add("decode", results[peer], "t/s", peer)
        ratio = report.ratio(f"decode, llmrun / {peer}", reported, results[peer])
        report.bound(f"decode, llmrun / {peer}, median of pairs", ratio, bound, at_most=False)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

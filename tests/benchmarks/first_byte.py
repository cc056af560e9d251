"""Cold start: seconds from the start of the process to the first byte of the answer.

    python tests/benchmarks/first_byte.py [--llama-completion PATH] [--runs 15]

llmrun and llama-completion take turns with the same model file, prompt, context window, threads and number of tokens,
greedy, the page cache warm; their answers must be the same. llama-completion gets --jinja, for only then does it use
the template that is in the file; with --raw both continue the bare text, so that no template is in the way.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import peers


class Start(NamedTuple):
    """One run: seconds to the first byte that is no blank, seconds to the end, and the whole answer."""

    first: float
    total: float
    answer: str


def measure(command: list[str]) -> Start:
    """Run a command and look at its stdout as it comes."""
    began = time.perf_counter()
    first, text = 0.0, b""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    while data := os.read(process.stdout.fileno(), 1 << 16):
        text += data
        if not first and text.strip():
            first = time.perf_counter() - began
    if process.wait() != 0:
        sys.exit(f"this failed with status {process.returncode}: {' '.join(command)}")
    answer = text.decode("utf-8", "replace").strip().removesuffix("[end of text]").strip()
    return Start(first, time.perf_counter() - began, answer)


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """The two command lines."""
    llmrun = peers.find_llmrun(options.llmrun)
    path = peers.model_file(llmrun, options.model)
    ctx, tokens, threads = str(options.ctx), str(options.max_tokens), str(options.threads or peers.cores())
    ours = [llmrun, "run", options.model, options.prompt, "--temp", "0", "-c", ctx, "-n", tokens]
    if options.threads:
        ours += ["-t", threads]
    theirs = [peers.find_tool("llama-completion", options.llama_completion), "-m", path, "-p", options.prompt]
    theirs += ["--temp", "0", "-c", ctx, "-n", tokens, "-t", threads, "--no-display-prompt", "--no-warmup"]
    if options.raw:
        return {"llmrun": [*ours, "--raw"], "llama-completion": [*theirs, "-no-cnv"]}
    return {"llmrun": ours, "llama-completion": [*theirs, "-st", "--jinja"]}


def main() -> int:
    """Measure and print."""
    parser = peers.parser(__doc__)
    parser.add_argument("--llama-completion", metavar="PATH", help="default: on PATH")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--ctx", type=int, default=8192)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--raw", action="store_true", help="no chat template on either side")
    options = parser.parse_args()
    peers.warn_if_busy()
    sides = {label: lambda command=command: measure(command) for label, command in commands(options).items()}
    results = peers.take_turns(options.runs, sides)
    report = peers.Report()
    for label, starts in results.items():
        report.add("first byte", [start.first for start in starts], "s", label)
        report.add("total", [start.total for start in starts], "s", label)
    answers = {label: {start.answer for start in starts} for label, starts in results.items()}
    n_different = len(answers["llmrun"] ^ answers["llama-completion"])
    report.bound("answers that differ", n_different, 0, at_most=True)
    ours, theirs = (statistics.median(start.first for start in starts) for starts in results.values())
    report.bound("first byte, llmrun / llama-completion", ours / theirs, 1.0, at_most=True)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

"""What `llmrun run -N` spares: several answers to one prompt at once, against as many runs of the command.

    python answers.py [MODEL] [--answers 8] [--tokens 128] [--runs 3] [--flash-attention auto|on|off]

Both sides are the installed command, taken in turns: `run -N K --seed S` once, `run --seed S+i` K times. It prints the
median wall time of each, their ratio, how often the prompt was prefilled, and the share of answers that are the same
text on both sides: a batch of several rows may round otherwise than one row alone. Run it on a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = "Write a story about a lighthouse keeper who finds a message in a bottle, and say what it tells him to do."
SEED = 7


def run(*arguments: str) -> str:
    """What the command prints."""
    command = [str(Path(sys.executable).with_name("llmrun")), "run", *arguments, PROMPT]
    return subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout


def together(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All answers of one run."""
    found: list[dict[str, Any]] = json.loads(
        run(*common(options), "-N", str(options.answers), "--seed", str(SEED), "--json")
    )
    return found


def alone(options: argparse.Namespace) -> list[str]:
    """The same answers, a run for each."""
    return [run(*common(options), "--seed", str(SEED + place)).rstrip("\n") for place in range(options.answers)]


def common(options: argparse.Namespace) -> list[str]:
    """What both sides are told."""
    return [options.model, "-n", options.tokens, "--flash-attention", options.flash_attention]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", default="128")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--flash-attention", default="auto")
    options = parser.parse_args()
    times: tuple[list[float], list[float]] = [], []
    for _ in range(options.runs):
        began = time.perf_counter()
        batch = together(options)
        between = time.perf_counter()
        single = alone(options)
        times[0].append(between - began)
        times[1].append(time.perf_counter() - between)
    once, each = map(statistics.median, times)
    computed = [answer["stats"]["prompt_tokens"] - answer["stats"]["reused_tokens"] for answer in batch]
    same = sum(answer["text"].rstrip("\n") == text for answer, text in zip(batch, single, strict=True))
    print(f"-N {options.answers}: {once:.2f} s; {options.answers} runs: {each:.2f} s; {once / each:.2f} of the time")
    print(f"prompt tokens computed by each: {computed}, of {batch[0]['stats']['prompt_tokens']}")
    print(f"the same text as the run with its seed: {same} of {options.answers}")


if __name__ == "__main__":
    main()

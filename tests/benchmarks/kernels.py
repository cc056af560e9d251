"""Compare llmrun's own matrix kernels with ggml's: prefill and decode of models, in turns, best of each.

    python tests/benchmarks/kernels.py MODEL.gguf ... [-- OPTIONS OF llmrun bench]

Each turn is a process of its own, because the choice of kernels (LLMRUN_KERNELS) is made at its start.
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from collections import defaultdict

TURNS = 3
OPTIONS = ("-p", "128,512,2048", "-n", "32", "-r", "2")


def rates(model: str, kernels: str, options: tuple[str, ...]) -> dict[str, float]:
    """Return the tokens per second of each test."""
    command = ("llmrun", "bench", model, *options, "-o", "csv")
    environment = {**os.environ, "LLMRUN_KERNELS": kernels}
    text = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    rows = csv.DictReader(io.StringIO(text))
    return {row["test"]: float(row["avg_ts"]) for row in rows}


def main() -> None:
    words = tuple(sys.argv[1:])
    at = words.index("--") if "--" in words else len(words)
    models, options = words[:at], words[at + 1 :] or OPTIONS
    for model in models:
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(TURNS):
            for kernels in ("", "ggml"):
                for test, rate in rates(model, kernels, options).items():
                    found[test, kernels].append(rate)
        for test in dict.fromkeys(test for test, _ in found):
            ours, others = max(found[test, ""]), max(found[test, "ggml"])
            print(
                f"{model}  {test:8}  llmrun {ours:8.1f}  ggml {others:8.1f} tokens/s  x {ours / others:.2f}", flush=True
            )


if __name__ == "__main__":
    main()

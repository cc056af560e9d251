"""`llmrun show` of a model with 280,000 merges and 262,144 tokens, from a cold start: milliseconds until it has ended.

    python tests/benchmarks/header.py [--runs 20]

The model is made in a temporary folder and has no weights worth the name. Beside the whole command stand its parts: an
interpreter that does nothing, and the reading of the header.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import peers

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.gguf_writer import TENSORS, gguf, metadata

from llmrun.gguf.reader import read_header

MOST_MILLISECONDS = 200
N_MERGES, N_TOKENS = 280_000, 262_144
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def large_vocabulary() -> bytes:
    """A model file whose texts are as long as those of real vocabularies."""
    source = random.Random(1)

    def word() -> str:
        return "".join(source.choices(_LETTERS, k=min(int(source.expovariate(1 / 6)) + 1, 40)))

    changes = {
        "tokenizer.ggml.tokens": [f"{word()}{number:x}" for number in range(N_TOKENS)],
        "tokenizer.ggml.scores": [0.0] * N_TOKENS,
        "tokenizer.ggml.token_type": [1] * N_TOKENS,
        "tokenizer.ggml.merges": [f"{word()} {word()}" for _ in range(N_MERGES)],
        "tokenizer.ggml.eos_token_id": N_TOKENS - 1,
    }
    return gguf(metadata(**changes), TENSORS)


def milliseconds(work: Callable[[], object], runs: int) -> list[float]:
    """How long each of some runs takes."""
    took = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        took.append((time.perf_counter() - start) * 1000)
    return sorted(took)


def main() -> int:
    """Measure and print."""
    parser = peers.parser(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    command = peers.find_llmrun(options.llmrun)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.gguf"
        path.write_bytes(large_vocabulary())
        parts: dict[str, Callable[[], object]] = {
            "python -c pass": lambda: subprocess.run([sys.executable, "-c", "pass"], check=True),
            "read_header()": lambda: read_header(path),
            "llmrun show --json": lambda: subprocess.run([command, "show", str(path), "--json"], check=True,
                                                         stdout=subprocess.DEVNULL),
            "llmrun show": lambda: subprocess.run([command, "show", str(path)], check=True, stdout=subprocess.DEVNULL),
        }  # fmt: skip
        print(f"a header of {path.stat().st_size / 1e6:.1f} MB, {N_TOKENS:,} tokens, {N_MERGES:,} merges: ms")
        for name, work in parts.items():
            took = milliseconds(work, options.runs)
            print(f"{name:20}  p50 {statistics.median(took):6.1f}  max {took[-1]:6.1f}")
    return 0 if peers.verdict("p50 in ms", statistics.median(took), MOST_MILLISECONDS, at_most=True) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`llmrun evaluate` beside llama-perplexity: the same figures on the same chunks, and what that takes.

    python evaluate.py TEXT MODEL.gguf REFERENCE.gguf [MODEL.gguf REFERENCE.gguf ...] [--chunks 8] [--rounds 3]

Each pair is measured by both; llama-perplexity first writes the reference's logits (100 kB a token of a vocabulary of
50,000), then reads them. Perplexity has to agree within 0.1 %, the mean KLD within 2 %; what else is printed has no
bound, because llama-perplexity compares with 16-bit log-probabilities. Then both take turns, and the ratio of their
wall times for one model's perplexity, and for the whole comparison, has to be at most 1.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import peers

from llmrun.planning.plan import LoadPreferences
from llmrun.protocol.jobs.evaluate import EvaluateResult
from llmrun.quantize.evaluate import evaluate, read_text

PERPLEXITY_BOUND, KLD_BOUND, TIME_BOUND = 0.001, 0.02, 1.0
# Our name -> llama-perplexity's line; percentages are divided by 100.
_LINES = {
    "perplexity": r"Mean PPL\(Q\)",
    "ratio": r"Mean PPL\(Q\)/PPL\(base\)",
    "mean": r"Mean    KLD",
    "median": r"Median  KLD",
    "p90": r"90\.0%   KLD",
    "p99": r"99\.0%   KLD",
    "maximum": r"Maximum KLD",
    "same_top": r"Same top p",
    "rms_change": r"RMS Δp",
}


@dataclass(frozen=True)
class Work:
    """What both programs do."""

    llama_perplexity: str
    text: Path
    model: Path
    reference: Path
    chunks: int
    n_ctx: int
    threads: int
    logits: Path

    def theirs(self, model: Path, *options: str) -> str:
        """llama-perplexity's output."""
        command = [self.llama_perplexity, "-m", str(model), "-f", str(self.text), "-c", str(self.n_ctx)]
        command += ["--chunks", str(self.chunks), "-t", str(self.threads), *options]
        environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(self.llama_perplexity).parent)}
        done = subprocess.run(command, capture_output=True, env=environment, check=True)
        return (done.stdout + done.stderr).decode("utf-8", "replace")

    def their_perplexity(self) -> float:
        """Of the model alone."""
        found = re.search(r"Final estimate: PPL = ([\d.]+)", self.theirs(self.model))
        return float(found[1]) if found else sys.exit("llama-perplexity gave no perplexity")

    def their_comparison(self) -> dict[str, float]:
        """What it says in two runs."""
        self.theirs(self.reference, "--save-all-logits", str(self.logits))
        said = self.theirs(self.model, "--kl-divergence-base", str(self.logits), "--kl-divergence")
        found = {}
        for name, line in _LINES.items():
            match = re.search(rf"^{line}\s*:\s*([-\d.]+).*?(%?)$", said, re.MULTILINE)
            if match is None:
                sys.exit(f"llama-perplexity said nothing about {name}")
            found[name] = float(match[1]) / (100 if match[2] else 1)
        return found

    def ours(self, *, compared: bool) -> EvaluateResult:
        """What llmrun says."""
        return evaluate(
            self.model,
            reference=self.reference if compared else None,
            text=read_text(self.text),
            n_ctx=self.n_ctx,
            chunks=self.chunks,
            preferences=LoadPreferences(threads=self.threads),
        )


def main() -> None:
    """Compare each pair, then take turns with the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL REFERENCE")
    parser.add_argument("--llama-perplexity", default=None, help="default: the one on PATH")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--n-ctx", type=int, default=512)
    parser.add_argument("--threads", type=int, default=peers.cores())
    parser.add_argument("--rounds", type=int, default=3, help="0 measures no times")
    arguments = parser.parse_args()
    program = peers.find_tool("llama-perplexity", arguments.llama_perplexity)
    holds = True
    with tempfile.TemporaryDirectory() as folder:
        works = [
            Work(
                program,
                arguments.text,
                *pair,
                arguments.chunks,
                arguments.n_ctx,
                arguments.threads,
                Path(folder, "logits"),
            )
            for pair in zip(arguments.models[::2], arguments.models[1::2], strict=True)
        ]
        for work in works:
            holds &= compare_figures(work)
        if arguments.rounds:
            holds &= compare_times(works[0], arguments.rounds)
    sys.exit(not holds)


def compare_figures(work: Work) -> bool:
    """Print both sides' figures; whether those that have a bound agree."""
    theirs, found = work.their_comparison(), work.ours(compared=True)
    alone, their_alone = work.ours(compared=False).perplexity, work.their_perplexity()
    divergence = found.divergence
    assert divergence is not None
    assert found.perplexity is not None
    assert alone is not None
    print(f"\n{work.model.name} beside {work.reference.name}, {found.chunks} chunks of {found.n_ctx}")
    print(f"{'':12}{'llmrun':>12}{'llama-perplexity':>18}{'difference':>12}")
    off = {}
    for name, their in {"alone": their_alone, **theirs}.items():
        figure = {"alone": alone, "perplexity": found.perplexity}.get(name) or getattr(divergence, name)
        ours = figure if isinstance(figure, float) else figure.value
        off[name] = abs(ours / their - 1)
        print(f"{name:12}{ours:12.6f}{their:18.6f}{ours / their - 1:+12.3%}")
    share = found.score_seconds / found.decode_seconds
    print(f"comparing took {share:.1%} of the time that the models took")
    good = peers.verdict("perplexity", max(off["alone"], off["perplexity"]), PERPLEXITY_BOUND, at_most=True)
    return peers.verdict("KLD", off["mean"], KLD_BOUND, at_most=True) and good


def compare_times(work: Work, rounds: int) -> bool:
    """Take turns; whether llmrun is at least as fast."""
    peers.warn_if_busy()
    sides = {
        "perplexity, llmrun": lambda: work.ours(compared=False),
        "perplexity, llama-perplexity": work.their_perplexity,
        "comparison, llmrun": lambda: work.ours(compared=True),
        "comparison, llama-perplexity": work.their_comparison,
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides) if turn % 2 else reversed(sides):
            began = time.perf_counter()
            sides[name]()
            taken[name].append(time.perf_counter() - began)
    print()
    for name, seconds in taken.items():
        print(f"{name:30}{peers.spread(seconds, 's', 2)}")
    holds = True
    for task in ("perplexity", "comparison"):
        pairs = zip(taken[f"{task}, llmrun"], taken[f"{task}, llama-perplexity"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        holds &= peers.verdict(f"time of {task}", ratio, TIME_BOUND, at_most=True)
    return holds


if __name__ == "__main__":
    main()

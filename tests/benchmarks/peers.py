"""The runner of the benchmarks: finds the programs, lets the sides take turns, prints one table and one JSON document.

Not a benchmark itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BUSY = 0.3  # other processes' load, from which on figures mean little


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--llmrun", metavar="PATH", default=None, help="the command; default: beside this Python, or PATH"
    )
    made.add_argument("--model", default="smollm2", help="name or path of a model that is on this disk")
    made.add_argument("--threads", type=int, default=None, help="default: what llmrun chooses")
    return made


def find_llmrun(given: str | None) -> str:
    """Return the path of the command."""
    found = given or shutil.which("llmrun", path=str(Path(sys.executable).parent)) or shutil.which("llmrun")
    return found or sys.exit("llmrun is not installed: pip install .")


def find_tool(name: str, given: str | None) -> str:
    """Return the path of one of llama.cpp's tools, best built from the commit that llama-cpp-python vendors."""
    found = shutil.which(given or name)
    return found or sys.exit(f"{given or name} is not on PATH; build llama.cpp, or give --{name} PATH")


def model_file(llmrun: str, model: str) -> str:
    """Return the path of the model's file."""
    shown = subprocess.run([llmrun, "show", model, "--json"], stdout=subprocess.PIPE, check=True)
    return str(json.loads(shown.stdout)["path"])


def cores() -> int:
    """Return the number of physical cores, llmrun's default for threads."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or usable, usable)


def warn_if_busy() -> None:
    """Warn of a busy machine: OpenMP's threads spin for each other, so a shared core slows them manyfold."""
    import psutil

    load = psutil.cpu_percent(1.0) / 100 * (os.cpu_count() or 1)
    if load > BUSY:
        print(f"warning: other processes use {load:.1f} cores; figures of either side mean little", file=sys.stderr)


def take_turns(runs: int, sides: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """Measure each side `runs` times, A B B A A B ...; a first turn of each only warms up."""
    results: dict[str, list[Any]] = {label: [] for label in sides}
    for turn in range(-1, runs):
        order = list(sides) if turn % 2 else list(reversed(sides))
        for label in order:
            result = sides[label]()
            if turn >= 0:
                results[label].append(result)
    return results


class Report:
    """The figures of a benchmark, in the order they were added."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, figure: str, values: Sequence[float], unit: str = "", side: str = "llmrun") -> None:
        """Add what was measured once or several times."""
        low, middle, high = min(values), statistics.median(values), max(values)
        row = {"figure": figure, "side": side, "unit": unit, "median": middle, "low": low, "high": high}
        self._append(row, f"{middle:,.3f} {unit} [{low:,.3f}..{high:,.3f}]")

    def ratio(self, figure: str, ours: Sequence[float], theirs: Sequence[float]) -> float:
        """Add the median ratio of pairs measured in turns, and return it."""
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        self.add(figure, ratios, "x", "ratio")
        return statistics.median(ratios)

    def bound(self, figure: str, value: float, bound: float, *, at_most: bool) -> None:
        """Add a value with the bound that it must keep."""
        holds = value <= bound if at_most else value >= bound
        row = {"figure": figure, "value": value, "bound": bound, "at_most": at_most, "holds": holds}
        wanted = f"at {'most' if at_most else 'least'} {bound}"
        self._append(row, f"{value:,.3f}, must be {wanted}: {'holds' if holds else 'MISSED'}")

    def _append(self, row: dict[str, Any], text: str) -> None:
        self.rows.append(row)
        print(f"{row['figure']:<60} {row.get('side', ''):<18} {text}", file=sys.stderr, flush=True)

    def finish(self) -> int:
        """Print the JSON document on stdout; return the exit status, 1 where a bound is missed."""
        print(json.dumps(self.rows, indent=1))
        return 0 if all(row.get("holds", True) for row in self.rows) else 1

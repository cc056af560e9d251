"""What the benchmarks beside llama.cpp's own tools share: finding the programs, taking turns, and summing up.

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
    """With the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--llmrun", metavar="PATH", default=None, help="the command; default: beside this Python, or PATH"
    )
    made.add_argument("--model", default="smollm2", help="name or path of a model that is on this disk")
    made.add_argument("--threads", type=int, default=None, help="default: what llmrun chooses")
    return made


def find_llmrun(given: str | None) -> str:
    """Path of the command."""
    found = given or shutil.which("llmrun", path=str(Path(sys.executable).parent)) or shutil.which("llmrun")
    return found or sys.exit("llmrun is not installed: pip install .")


def find_tool(name: str, given: str | None) -> str:
    """Path of one of llama.cpp's tools; it should be of the commit that llama-cpp-python vendors."""
    found = shutil.which(given or name)
    return found or sys.exit(f"{given or name} is not on PATH; build llama.cpp, or give --{name} PATH")


def model_file(llmrun: str, model: str) -> str:
    """Path of the model's file."""
    shown = subprocess.run([llmrun, "show", model, "--json"], stdout=subprocess.PIPE, check=True)
    return str(json.loads(shown.stdout)["path"])


def cores() -> int:
    """Physical cores, which is what llmrun gives a model."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or usable, usable)


def warn_if_busy() -> None:
    """Say that the machine is busy: OpenMP's threads spin for each other, so a shared core slows them manyfold."""
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


def spread(values: Sequence[float], unit: str, digits: int = 3) -> str:
    """Median and extremes."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} {unit} [{low:.{digits}f}..{high:.{digits}f}]"


def verdict(name: str, ratio: float, bound: float, *, at_most: bool) -> bool:
    """Print a ratio beside its bound; whether it holds."""
    holds = ratio <= bound if at_most else ratio >= bound
    print(f"{name}: {ratio:.3f}, wanted at {'most' if at_most else 'least'} {bound}: {'holds' if holds else 'MISSED'}")
    return holds

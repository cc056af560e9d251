"""What a look at 50 models and a press of the Tab key cost: milliseconds of whole processes, started cold.

    python tests/benchmarks/names.py [--runs 20]

30 models in the hub's cache, 10 of Ollama, 10 of LM Studio, in a temporary folder. Processor time is printed beside
wall time: on a busy machine only the former means something.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.gguf_writer import tiny_model
from support.model_disk import put, put_lm_studio, put_ollama, settings

from llmrun.models.store.store import Store

ENTRY = "import sys; sys.argv[0] = 'llmrun'; from llmrun.__main__ import main; main()"
BASH = {"_LLMRUN_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "list": (["list"], {}),
    "list --json": (["list", "--json"], {}),
    "run <TAB>": ([], {**BASH, "COMP_WORDS": "llmrun\nrun\n"}),
    "rm <TAB>": ([], {**BASH, "COMP_WORDS": "llmrun\nrm\n"}),
}


def fill(home: Path) -> dict[str, str]:
    """Make the models; gives the environment in which they are found."""
    store = Store(settings(home / "hub"))
    for number in range(30):
        content = tiny_model({"general.name": f"model {number}"})
        put(store, f"model-{number}-Q4_K_M.gguf", repository=f"maker/model-{number}-GGUF", content=content)
    for number in range(10):
        put_ollama(home / ".ollama/models", f"library/model{number}:8b", tiny_model({"general.name": f"o{number}"}))
        put_lm_studio(home / ".lmstudio/models", f"maker/model-{number}", "m-Q4_K_M.gguf", tiny_model())
    return {"HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "OLLAMA_MODELS": str(home / ".ollama/models")}


def measure(arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """One process: (wall, processor) milliseconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", ENTRY, *arguments], env={**os.environ, **environment}, capture_output=True, check=True
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall * 1000, (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


def main() -> None:
    """Measure every case, in turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        environment = fill(Path(folder))
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
        for _ in range(runs):
            for name, (arguments, variables) in CASES.items():
                seen[name].append(measure(arguments, {**environment, **variables}))
    print(f"{'':12}  {'wall ms':>8}  {'best':>6}  {'cpu ms':>7}")
    for name, pairs in seen.items():
        walls, processors = zip(*pairs, strict=True)
        row = (statistics.median(walls), min(walls), statistics.median(processors))
        print(f"{name:12}  {row[0]:8.0f}  {row[1]:6.0f}  {row[2]:7.0f}")


if __name__ == "__main__":
    main()

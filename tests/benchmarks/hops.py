"""The way of --top-k from the command line to the sampler: functions of llmrun/ that hand its value on.

    python tests/benchmarks/hops.py smollm2 [FOLDER]

FOLDER is another checkout, with its native part built, to compare. A function is a hop if it gets the value in an
argument, alone or inside of a text, a collection or a record, and returns it, gives it to another hop, to the pipe or
to the native sampler; it counts once. Those that only look at it are none.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

VALUE = "31337"
# Runs at the start of each Python process; prints nothing, so that the pipe between them stays theirs.
WATCH = """
import itertools, os, sys, threading
folder, value = os.environ["HOPS_FOLDER"] + "/llmrun/", os.environ["HOPS_VALUE"]
ends = ("Pipe._write", "SequenceSampler.__init__")
local, count, told = threading.local(), itertools.count(), set()
def carries(thing, depth=0):
    cls = type(thing)
    if cls is int: return thing == int(value)
    if cls is str: return value in thing
    if cls in (bytes, bytearray): return value.encode() in thing
    if depth > 4: return False
    if cls is dict: return any(carries(inner, depth + 1) for inner in list(thing.values()))
    if cls in (list, tuple): return any(carries(inner, depth + 1) for inner in list(thing)[:200])
    names = getattr(cls, "__dataclass_fields__", None) or getattr(cls, "_fields", ())
    return any(carries(getattr(thing, name, None), depth + 1) for name in names)
def watch(frame, event, result):
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(folder): return
    if not hasattr(local, "stack"): local.stack = []
    if event == "call":
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
        gets = any(carries(frame.f_locals.get(name)) for name in names)
        local.stack.append([next(count), gets, code.co_qualname in ends])
    elif local.stack:
        order, gets, passes = local.stack.pop()
        if gets and (passes or carries(result)):
            for above in reversed(local.stack):
                if above[1]:
                    above[2] = True
                    break
            if code not in told:
                told.add(code)
                with open(os.environ["HOPS_FILE"], "a") as file:
                    print(os.getpid(), order, code.co_filename[len(folder) :], code.co_qualname, file=file)
sys.setprofile(watch)
threading.setprofile(watch)
"""


def hops(model: str, folder: Path) -> list[tuple[str, str, str]]:
    """Return (process, file, function) of each hop."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "sitecustomize.py").write_text(WATCH, encoding="utf-8")
        notes = Path(place, "notes")
        paths = os.pathsep.join((place, str(folder)))
        environment = {"PYTHONPATH": paths, "HOPS_FOLDER": str(folder), "HOPS_FILE": str(notes), "HOPS_VALUE": VALUE}
        words = ["run", model, "hi", "--top-k", VALUE, "--max-tokens", "2", "--yes"]
        program = "from llmrun.__main__ import main; main()"
        subprocess.run(
            [sys.executable, "-c", program, *words], cwd=folder, env={**os.environ, **environment}, check=True
        )
        lines = [line.split(" ", 3) for line in notes.read_text(encoding="utf-8").splitlines()]
        return [
            (process, file, name) for process, _, file, name in sorted(lines, key=lambda line: (line[0], int(line[1])))
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[2])
    arguments = parser.parse_args()
    way = hops(arguments.model, arguments.folder.resolve())
    for process, file, function in way:
        print(f"{process:>8} {file:<40} {function}")
    print(f"{len(way)} functions")


if __name__ == "__main__":
    main()

"""Which lines of native/ the native tests execute; every one of sampler.cpp has to be among them.

    python tests/coverage_native.py

Builds native/ once more, in a temporary folder, with gcc's counters; needs gcc, gcov and cmake. Exits with 1 when a
native test fails or a line of sampler.cpp is never executed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[1] / "native"
COMPLETE = "sampler.cpp"
RANDOM_CASES = 4000


def run(*command: str | Path) -> str:
    """What the command wrote; what went wrong is shown."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def execute_tests(build: Path) -> None:
    options = ("-DLLMRUN_TESTS=ON", "-DLLMRUN_COVERAGE=ON", f"-DLLMRUN_RANDOM_CASES={RANDOM_CASES}")
    run("cmake", "-S", NATIVE, "-B", build, "-DCMAKE_CXX_COMPILER=g++", *options)
    parallel = ("--parallel", str(os.cpu_count() or 1))
    run("cmake", "--build", build, *parallel)
    run("ctest", "--test-dir", build, *parallel, "--output-on-failure")


def count_lines(build: Path, source: Path) -> tuple[int, list[str]]:
    """How many lines have code, and those never executed, as gcov prints them."""
    counters = next(build.rglob(f"{source.name}.gcda"))
    executed: set[str] = set()
    missed: set[str] = set()
    in_source = False
    for row in run("gcov", "--stdout", counters).splitlines():
        # "   count:  line: text"; the count is "-" where there is no code, "#####" or "=====" where it is not executed.
        count, number, text = (part.strip() for part in f"{row}::".split(":", 2))
        if text.startswith("Source:"):
            in_source = Path(text.removeprefix("Source:").rstrip(":")).name == source.name
        # On the brace that ends a function gcov counts the clean-up after an exception there.
        if in_source and number.isdigit() and number != "0" and count != "-" and text != "}::":
            line = f"{int(number):>5}: {text.removesuffix('::')}"
            (missed if count in ("#####", "=====") else executed).add(line)
    # One instance of a template may be executed, and another one not.
    return len(missed | executed), sorted(missed - executed)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        build = Path(folder)
        execute_tests(build)
        for source in sorted(NATIVE.glob("*.cpp")):
            if source.name.startswith("test_") or not list(build.rglob(f"{source.name}.gcda")):
                continue
            lines, missed = count_lines(build, source)
            print(f"{source.name:<16}{1 - len(missed) / lines:>7.1%} of {lines} lines", *missed, sep="\n")
            if source.name == COMPLETE and missed:
                sys.exit(f"some lines of {COMPLETE} are never executed by the native tests")


if __name__ == "__main__":
    main()

"""The comparison with llama-bench on this machine, measured in turns: A B B A A B ...

Both sides get the same file and settings. llama-bench starts anew for every repetition, loads, warms up and measures
once; our engine stays, and warms up before each repetition as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llmrun.errors import LlmrunError, UsageError
from llmrun.lab.bench.cases import Case
from llmrun.lab.bench.compare import same_build
from llmrun.lab.bench.machine import sample_warnings
from llmrun.lab.bench.results import BenchRow, Result
from llmrun.lab.bench.run import BenchedModel, BenchRequest, Worker, run
from llmrun.planning.hardware import Hardware
from llmrun.protocol.codec import load_json
from llmrun.protocol.settings import DEFAULTS, DEVICE_SETTINGS, SETTINGS
from llmrun.statistics import Verdict, compare
from llmrun.system import user_path

LLAMA_BENCH = "llama-bench"


@dataclass(frozen=True, slots=True)
class ExternalComparison:
    """Both sides of one test."""

    # Rows with their samples in pairs.
    ours: BenchRow
    theirs: BenchRow
    verdict: Verdict  # of ours against theirs
    notes: tuple[str, ...] = ()  # differences between the sides, in words


def check_name(name: str) -> None:
    """Raise UsageError if a program is not llama-bench, by its name or path."""
    if LLAMA_BENCH not in Path(name).name.lower():
        hint = "--vs llama-bench, or its path"
        raise UsageError(f"--vs can't measure {name!r}", why=f"it knows {LLAMA_BENCH} only", hint=hint)


def find(name: str, environment: Mapping[str, str] = os.environ) -> LlamaBench:
    """Find llama-bench by name or path.

    Raises:
        UsageError: it is not installed, or the name is another program's.
    """
    check_name(name)
    path = user_path(name)
    is_path = path.name != name
    executable = shutil.which(path if is_path else name, path=environment.get("PATH"))
    if executable is None:
        raise UsageError(
            f"there is no {name}",
            why="no such program" if is_path else "it is not on the PATH",
            hint="give its path: --vs /path/to/llama-bench",
        )
    return LlamaBench(executable)


def versus(
    other: LlamaBench,
    ours: Callable[[], BenchRow],
    model: BenchedModel,
    case: Case,
    *,
    repetitions: int = 5,
    on_update: Callable[[int, int], None] = lambda done, total: None,
) -> ExternalComparison:
    """Measure both in turns.

    Args:
        ours: measures one repetition on our side.
        repetitions: of each side.
        on_update: called with the repetitions done and their total.

    Raises:
        LlmrunError: one side fails.
    """
    rows: dict[bool, list[BenchRow]] = {True: [], False: []}
    on_update(0, 2 * repetitions)
    for number in range(repetitions):
        # The second side finds a warmer machine: the order changes with every pair.
        for is_ours in (True, False) if number % 2 == 0 else (False, True):
            rows[is_ours].append(ours() if is_ours else other.measure(model, case))
            on_update(len(rows[True]) + len(rows[False]), 2 * repetitions)
    left, right = merged(rows[True]), merged(rows[False])
    verdict = compare(right.samples_ts, left.samples_ts, paired=True)
    why = (verdict.why,) if verdict.kind == "noisy" else ()
    builds: tuple[str, ...] = ()
    if right.build_commit and not same_build(left.build_commit, right.build_commit):
        builds = (f"another build of ggml: ours {left.build_commit or 'unknown'}, theirs {right.build_commit}",)
    return ExternalComparison(left, right, verdict, (*builds, *why))


def merged(rows: Sequence[BenchRow]) -> BenchRow:
    """Merge rows of one repetition each."""
    samples = tuple(ns for row in rows for ns in row.samples_ns)
    peaks = [row.peak_bytes for row in rows if row.peak_bytes]
    # Warnings about a single sample mean nothing; each disturbance is listed once.
    disturbances = {warning.kind: warning for row in rows for warning in row.warnings if warning.is_disturbance}
    row = replace(
        rows[0],
        samples_ns=samples,
        repetitions=len(samples),
        peak_bytes=max(peaks, default=None),
        chat=None,
    )
    return replace(row, warnings=(*disturbances.values(), *sample_warnings(row.samples_ts)))


def result_of(comparisons: Sequence[ExternalComparison]) -> Result:
    """Return a result with the rows of both sides in turns."""
    rows = tuple(
        row
        for comparison in comparisons
        for row in (comparison.ours, replace(comparison.theirs, machine=comparison.ours.machine))
    )
    machine = rows[0].machine if rows else None
    return Result(rows, machine) if machine else Result(rows)


@contextmanager
def our_side(start: Callable[[], Worker], hardware: Hardware) -> Iterator[Callable[[BenchedModel, Case], BenchRow]]:
    """Yield a function that measures one repetition, with one engine for the whole block."""
    engine = _BorrowedWorker(start())

    def measure(model: BenchedModel, case: Case) -> BenchRow:
        request = BenchRequest((model,), (case,), repetitions=1, with_limits=False)
        outcome = run(request, hardware, start=lambda environment: engine)
        if outcome.error is not None:
            raise outcome.error
        return outcome.result.rows[0]

    try:
        yield measure
    finally:
        engine.end()


class _BorrowedWorker:
    """An engine that run() does not close."""

    def __init__(self, worker: Worker) -> None:
        self.do = worker.do
        self.end = worker.close

    def close(self) -> None:
        pass


# ---- llama-bench -----------------------------------------------------------------------------------


class LlamaBench:
    """llama.cpp's own benchmark."""

    def __init__(self, where: str) -> None:
        self.where = where

    def measure(self, model: BenchedModel, case: Case) -> BenchRow:
        """Measure one repetition in a new process.

        Raises:
            UsageError: llama-bench has no such test, or can't be started.
            LlmrunError: it failed.
        """
        if case.test.chat:
            raise UsageError(
                f"llama-bench has no test like {case.test.name}",
                why="it neither samples nor makes text",
                hint="leave out the chat test",
            )
        try:
            done = subprocess.run(
                [self.where, *arguments(model.path, case)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )
        except OSError as error:
            raise UsageError(f"{self.where} can't be started", why=error.strerror or str(error)) from None
        lines = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise self._failed(done, case)
        try:
            row = BenchRow.from_json(load_json(lines[-1]))
        except ValueError:
            raise self._failed(done, case) from None
        return replace(row, model=model.name, test=case.test.name)

    def _failed(self, done: subprocess.CompletedProcess[bytes], case: Case) -> LlmrunError:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        how = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        text = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else how)
        return LlmrunError(
            f"llama-bench could not measure {case.test.name}", why=text.strip(), hint=f"try it alone: {self.where} -h"
        )


def arguments(path: Path, case: Case) -> list[str]:
    """Return llama-bench's arguments for one repetition. Defaults are left out: older versions lack some options."""
    settings, test = case.settings, case.test
    both = test.n_prompt and test.n_gen
    options = {
        "-m": str(path),
        "-p": "0" if both else str(test.n_prompt),
        "-n": "0" if both else str(test.n_gen),
        "-t": str(settings.threads),
        "-b": str(settings.n_batch),
        "-ub": str(settings.n_ubatch),
        "-ctk": settings.kv_type_k,
        "-ctv": settings.kv_type_v,
        "-r": "1",
        "-o": "jsonl",
    }
    if both:
        options["-pg"] = f"{test.n_prompt},{test.n_gen}"
    if test.n_depth:
        options["-d"] = str(test.n_depth)
    if settings.gpu_layers >= 0:
        options["-ngl"] = str(settings.gpu_layers)
    if settings.cpu_experts:
        options["-ncmoe"] = str(len(settings.cpu_experts))
    for name in DEVICE_SETTINGS:
        if getattr(settings, name) != getattr(DEFAULTS, name):
            options[SETTINGS[name].short] = str(getattr(settings, name))
    if settings.flash_attention != "auto":
        options["-fa"] = "1" if settings.flash_attention == "on" else "0"
    if not settings.repack:
        options["--repack"] = "0"
    return [part for pair in options.items() for part in pair]

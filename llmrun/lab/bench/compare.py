"""The comparison of two sides, row by row: pairs, differences and verdicts.

Pure but for resolve(), which reads files and the history; the verdicts are statistics.py's. Differences of two
rows besides speed are always reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, stdev
from typing import Any

from llmrun import statistics
from llmrun.errors import UsageError, listed
from llmrun.lab.bench.formats import read_file
from llmrun.lab.bench.history import History
from llmrun.lab.bench.results import BenchRow, Machine, Result
from llmrun.protocol.codec import as_dict
from llmrun.protocol.settings import SETTINGS
from llmrun.protocol.sizes import readable_size
from llmrun.statistics import Verdict
from llmrun.system import user_path

MOST_RUNS = 20
"""The number of newest results that count for a machine, version or model."""
ENOUGH_RUNS = 4
"""The number of runs of each side from which each run counts as one sample."""

# Setting that affects the speed of a test -> its name for users.
_SETTINGS = {
    **{setting.column: setting.label for setting in SETTINGS.values() if setting.column},
    "backends": "backends",
    "environment": "environment",
}
_MACHINE = {
    "cpu": "processor",
    "cpu_flags": "its instructions",
    "cores": "cores",
    "threads": "usable threads",
    "cpu_quota": "container's quota",
    "memory_total": "memory",
    "memory_speed": "kind of memory",
    "gpus": "GPUs",
    "os": "system",
    "kernel": "kernel",
    "governor": "governor",
    "llmrun": "llmrun",
    "llama": "llama-cpp-python",
    "build_commit": "ggml",
    "python": "Python",
}
_FILES = (".json", ".jsonl")
_DIRTY = "-dirty"


@dataclass(frozen=True, slots=True)
class ComparedSide:
    """One result, or several of one machine, version or model."""

    label: str
    results: tuple[Result, ...]  # the newest first


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting, e.g. "threads", with its different values on the two sides, in words."""

    what: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.what} {self.a} / {self.b}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A row of each side to compare."""

    # The newest rows of each side.
    a: BenchRow
    b: BenchRow
    verdict: Verdict  # of B against A
    runs: tuple[int, int]  # how many runs of each side count; 1 and 1 unless both sides have several
    differences: tuple[Difference, ...] = ()  # in model, settings or program; empty when only the speed may differ
    notes: tuple[str, ...] = ()  # what to know about the verdict, in words


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of B with A."""

    # Labels of the two sides.
    a: str
    b: str
    pairs: tuple[Pair, ...]  # in A's order
    machines: tuple[Difference, ...]  # what differs between the machines and the programs on them
    # Rows that have no partner.
    only_a: tuple[BenchRow, ...]
    only_b: tuple[BenchRow, ...]

    @property
    def summary(self) -> str:
        """One line: the number of rows that differ, and the number expected by chance."""
        different = sum(pair.verdict.is_different for pair in self.pairs)
        noisy = sum(pair.verdict.kind == "noisy" for pair in self.pairs)
        text = f"{different} of {len(self.pairs)} rows differ" if different else "no difference seen"
        if noisy == len(self.pairs):
            text = "too noisy to tell"
        elif noisy:
            text += f", {noisy} {'is' if noisy == 1 else 'are'} too noisy to tell"
        by_chance = (1 - statistics.CONFIDENCE) * len(self.pairs)
        if 0 < different <= by_chance + 1 and len(self.pairs) >= 10:
            text += f"; chance alone makes {max(round(by_chance), 1)} of {len(self.pairs)} look different"
        return text

    def to_json(self) -> dict[str, Any]:
        """Return ratios and verdicts as JSON data; the samples are in the results."""
        return {
            "a": self.a,
            "b": self.b,
            "rows": [_pair_json(pair) for pair in self.pairs],
            "machines": [as_dict(difference) for difference in self.machines],
            "only_a": [_name(row) for row in self.only_a],
            "only_b": [_name(row) for row in self.only_b],
        }


def resolve(which: str, history: History) -> ComparedSide:
    """Return the side that a user named: a file, a result's number, "last", a machine, a version, a model.

    Raises:
        UsageError: there is none.
        LlmrunError: it can't be read.
    """
    path = user_path(which)
    if path.is_file() or path.suffix.lower() in _FILES:
        return ComparedSide(path.name, (read_file(path),))
    entries = history.select(which)
    if len(entries) == 1:
        label = f"result {entries[0].number} ({entries[0].machine})"
        return ComparedSide(label if which.isdecimal() or which == "last" else which, (history.result(entries[0]),))
    return ComparedSide(which, tuple(history.result(entry) for entry in entries[:MOST_RUNS]))


def compare_results(a: ComparedSide, b: ComparedSide) -> Comparison:
    """Compare B with A.

    Raises:
        UsageError: no row of one has a partner in the other.
    """
    rows_a, rows_b = _by_key(a), _by_key(b)
    pairs = [_pair(rows_a.pop(key), rows_b.pop(partner)) for key, partner in _partners(rows_a, rows_b)]
    if not pairs:
        raise UsageError(
            f"{a.label} and {b.label} have no rows in common",
            why=f"one has {_some(rows_a.values())}; the other {_some(rows_b.values())}",
            hint="run the same tests on both: llmrun bench MODEL -p 512 -n 128",
        )
    return Comparison(
        a.label,
        b.label,
        tuple(pairs),
        machine_differences(pairs[0].a.machine or a.results[0].machine, pairs[0].b.machine or b.results[0].machine),
        tuple(runs[0] for runs in rows_a.values()),
        tuple(runs[0] for runs in rows_b.values()),
    )


def machine_differences(a: Machine, b: Machine) -> tuple[Difference, ...]:
    """Return the differences of two machines, in the facts known of both."""
    differences = []
    for name, words in _MACHINE.items():
        left, right = getattr(a, name), getattr(b, name)
        if name == "threads" and not (a.cores and b.cores):
            continue  # in a row of llama-bench: the threads it used
        if name == "build_commit" and same_build(left, right):
            continue
        if name == "cpu_quota":  # None is "no limit"
            left, right = left or "none", right or "none"
        if left == right or not left or not right:
            continue
        if name == "memory_total":
            left, right = readable_size(left), readable_size(right)
        elif name == "cpu_flags":
            left, right = sorted(set(left) - set(right)), sorted(set(right) - set(left))
        differences.append(Difference(words, _words(left), _words(right)))
    return tuple(difference for difference in differences if difference.a != difference.b)


def same_build(a: str, b: str) -> bool:
    """Return whether two commits of ggml are the same; builds from an archive outside git end in "-dirty"."""
    return a.removesuffix(_DIRTY) == b.removesuffix(_DIRTY)


# ---- pairs ----------------------------------------------------------------------------------------

_Key = tuple[Any, ...]
# Parts of a key, from all to fewest.
_ALL, _BUT_PROGRAM, _MODEL_AND_TEST, _TEST = slice(None), slice(-1), slice(2), slice(1, 2)


def _by_key(side: ComparedSide) -> dict[_Key, list[BenchRow]]:
    """Return model, test, settings and program -> rows of all runs, the newest first."""
    rows_by_key: dict[_Key, list[BenchRow]] = {}
    for result in side.results:
        for row in result.rows:
            if row.samples_ts:
                key = (_model(row), row.test, *_settings(row).items(), row.program)
                rows_by_key.setdefault(key, []).append(row)
    return rows_by_key


def _model(row: BenchRow) -> _Key:
    """Return kind and size of a model. Speed depends on nothing else; paths and names differ between machines."""
    return (row.model_type, row.model_size, row.model_n_params)


def _settings(row: BenchRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in _SETTINGS}
    values["n_threads_batch"] = row.n_threads_batch or row.n_threads
    values["environment"] = ", ".join(f"{name}={value}" for name, value in sorted(row.environment.items()))
    if row.backends == "CPU":
        values["n_gpu_layers"] = 0  # regardless of the setting
    return values


def _partners(a: dict[_Key, list[BenchRow]], b: dict[_Key, list[BenchRow]]) -> Iterator[tuple[_Key, _Key]]:
    """Match equal keys, then keys equal but for the program, then for the settings, then tests of one model each."""
    left, right = list(a), list(b)

    def take(key: _Key, partner: _Key) -> tuple[_Key, _Key]:
        left.remove(key)
        right.remove(partner)
        return key, partner

    one_model = len({key[0] for key in a}) == 1 == len({key[0] for key in b})
    levels = (_ALL, _BUT_PROGRAM, _MODEL_AND_TEST, *((_TEST,) if one_model else ()))
    for level in levels:
        for key in list(left):
            like = [other for other in right if other[level] == key[level]]
            # With several partners, the right one is unknown.
            if len(like) == 1 and sum(other[level] == key[level] for other in left) == 1:
                yield take(key, like[0])


def _pair(a: list[BenchRow], b: list[BenchRow]) -> Pair:
    newest_a, newest_b = a[0], b[0]
    differences = tuple(_row_differences(newest_a, newest_b))
    if min(len(a), len(b)) >= ENOUGH_RUNS:
        medians_a, medians_b = ([median(row.samples_ts) for row in rows] for rows in (a, b))
        verdict = statistics.compare(medians_a, medians_b, between=0)
        return Pair(newest_a, newest_b, verdict, (len(a), len(b)), differences, ("each run counts as one sample",))
    disturbed = [side for side, row in (("A", newest_a), ("B", newest_b)) if row.is_disturbed]
    between = max(statistics.BETWEEN, _between(a), _between(b), statistics.DISTURBED if disturbed else 0.0)
    verdict = statistics.compare(newest_a.samples_ts, newest_b.samples_ts, between=between)
    if disturbed and verdict.kind == "noisy":
        why = f"{' and '.join(disturbed)} {'was' if len(disturbed) == 1 else 'were'} disturbed"
        verdict = verdict._replace(why=why)
    notes = [f"{side}: {row.warning_text}" for side, row in (("A", newest_a), ("B", newest_b)) if row.warnings]
    if verdict.kind == "noisy" and not disturbed:
        notes.append(verdict.why)
    return Pair(newest_a, newest_b, verdict, (1, 1), differences, tuple(notes))


def _between(runs: Sequence[BenchRow]) -> float:
    """Return the deviation between this machine's runs of one test, where there are enough runs."""
    if len(runs) < ENOUGH_RUNS:
        return 0.0
    return stdev(math.log(median(row.samples_ts)) for row in runs)


def _row_differences(a: BenchRow, b: BenchRow) -> Iterator[Difference]:
    if _model(a) != _model(b):
        yield Difference("model", _model_words(a), _model_words(b))
    if a.program != b.program:
        yield Difference("program", a.program, b.program)
    settings_a, settings_b = _settings(a), _settings(b)
    for name, words in _SETTINGS.items():
        left, right = settings_a[name], settings_b[name]
        # Batch threads follow the threads unless they are set.
        follows = name == "n_threads_batch" and not a.n_threads_batch and not b.n_threads_batch
        if left != right and not follows:
            yield Difference(words, _words(left), _words(right))


def _model_words(row: BenchRow) -> str:
    return f"{row.kind or row.model} ({readable_size(row.size)})"


# ---- words -----------------------------------------------------------------------------------------


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "none of its own"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def _name(row: BenchRow) -> str:
    return f"{row.model or row.model_type} {row.test}"


def _some(rows: Any) -> str:
    names = [f"{runs[0].test} of {_model_words(runs[0])} with {runs[0].n_threads} threads" for runs in rows]
    return listed(names, 4)


def _pair_json(pair: Pair) -> dict[str, Any]:
    verdict = as_dict(pair.verdict)
    if math.isinf(verdict["high"]):
        verdict["high"] = None
    return {
        "model": pair.a.model or pair.a.model_type,
        "test": pair.a.test,
        "a_ts": pair.a.avg_ts,
        "b_ts": pair.b.avg_ts,
        **verdict,
        "runs": list(pair.runs),
        "differences": [as_dict(difference) for difference in pair.differences],
        "notes": list(pair.notes),
    }

"""Tuning of one model: the settings to try, the search for fast ones, its engines, and what is remembered.

The search sweeps one axis after another, then confirms what it found beside the default. Prefill and decode are tuned
separately, since they want different settings. Candidates and their base are measured in turns, A B B A, and judged by
bench's own comparison of pairs. Only what is significantly faster than the default in measurements of its own is kept.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from llmrun.errors import BadModelError, EngineCrashedError, ResourceError, UsageError, require_within
from llmrun.gguf.header import Header
from llmrun.lab.bench.machine import DisturbanceMonitor
from llmrun.lab.bench.results import BenchWarning
from llmrun.lab.bench.run import EnginePool
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import MOST_UBATCH, UBATCH, repacked_types
from llmrun.planning.plan import Plan, margin
from llmrun.planning.preferences import CONTEXT_BOUNDS
from llmrun.planning.tuned import Profile, TunableSettings, TunedSettings, remember, remembered, words
from llmrun.protocol.codec import as_dict
from llmrun.protocol.devices import SPLIT_MODES
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.bench import BENCH, Bench, BenchTest
from llmrun.protocol.jobs.machine import CPU_VARIANTS
from llmrun.protocol.llama_folder import has_variants
from llmrun.protocol.loading import Load
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch
from llmrun.statistics import Verdict, compare, student
from llmrun.system import read_text

PREFILL, DECODE = "prefill", "decode"
"""Goals of tuning; they want different settings."""

Change = tuple[tuple[str, Any], ...]
"""Fields of TunableSettings with their new values."""

_UBATCHES, _LARGER_UBATCHES = (256, 128), (1024, MOST_UBATCH)
_SPINS = (0, 300_000)  # passive waiting; and libgomp's own default
_COPIES = 2.2  # memory, in sizes of the weights, to read them beside a copy that is loaded
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting to try."""

    name: str
    changes: tuple[Change, ...]  # the values to try
    goals: tuple[str, ...]  # which of PREFILL and DECODE it affects
    at_depth: bool = False  # it matters only with many tokens in the context
    whole_batch: bool = False  # it matters only for prompts of a whole batch
    wants_quiet: bool = False  # the best value differs while other programs compute

    def rivals(self, settings: TunableSettings) -> dict[TunableSettings, str]:
        """Return the other settings along this axis, each with its change in words."""
        candidates = {replace(settings, **dict(change)): change for change in self.changes}
        candidates.pop(settings, None)
        return {
            candidate: ", ".join(dict.fromkeys(words(*part) for part in change))
            for candidate, change in candidates.items()
        }


def most_ubatch(header: Header, hardware: Hardware) -> int:
    """Return the tokens of the largest micro-batch to try.

    A micro-batch reads all experts, or copies the weights in RAM to a GPU, once for all of its tokens.
    """
    return MOST_UBATCH if hardware.gpus or header.expert_bytes else UBATCH


def axes_for(
    header: Header,
    hardware: Hardware,
    default: TunableSettings,
    *,
    kv: bool = False,
    n_batch: int = UBATCH,
    n_gpus: int = 0,
    cpu_variants: Sequence[str] = (),
) -> tuple[Axis, ...]:
    """Return the axes to try, the most promising first; axes that load the model again come late.

    Args:
        kv: include a quantized KV cache, which loses precision.
        n_batch: tokens of a batch, and of the largest micro-batch that there is memory for.
        n_gpus: number of GPUs that hold the model.
        cpu_variants: of the processor's backend that can run here, ggml's choice first.
    """
    both = (PREFILL, DECODE)
    flips = "on" if default.flash_attention == "off" else "off"
    counts = thread_counts(hardware)
    axes = [
        Axis("threads", _values("threads", counts), (DECODE,), wants_quiet=True),
        Axis("batch threads", _values("threads_batch", counts), (PREFILL,), wants_quiet=True),
    ]
    if n_gpus > 1:
        axes.insert(0, Axis("split mode", _values("split_mode", SPLIT_MODES), both))
    if set(header.bytes_per_type) & repacked_types(hardware.cpu_flags):
        axes.append(Axis("repack", _values("repack", (not default.repack,)), both))
    if len(cpu_variants) > 1:
        variants = ("", *cpu_variants[1:])
        axes.append(Axis("processor variant", _values("cpu_variant", variants), both))
    if default.kv_type_v == "f16":  # a quantized cache needs flash attention
        axes.append(Axis("flash attention", _values("flash_attention", (flips,)), both, at_depth=True))
    if kv:
        quantized = (("kv_type_k", "q8_0"), ("kv_type_v", "q8_0"), ("flash_attention", "on"))
        axes.append(Axis("KV type", (quantized,), both, at_depth=True))
    axes.append(Axis("ubatch", _values("n_ubatch", _UBATCHES), (PREFILL,), whole_batch=True))
    larger = [_values("n_ubatch", (count,)) for count in _LARGER_UBATCHES if count <= n_batch]
    axes += [Axis("larger ubatch", changes, (PREFILL,), whole_batch=True) for changes in larger]
    axes += _memory_axes(header, hardware, huge_pages=_HUGE_PAGES)
    return tuple(axes)


def thread_counts(hardware: Hardware) -> tuple[int, ...]:
    """Return thread counts that may be fastest: all cores, all hardware threads, and parts of the cores."""
    cores = hardware.usable_cores
    counts = {cores, cores - 1, -(-cores * 3 // 4), -(-cores // 2), -(-cores // 4)}
    if hardware.cpu_quota is None:
        counts.add(hardware.logical_cores)
    return tuple(sorted((count for count in counts if count > 0), reverse=True))


def _memory_axes(header: Header, hardware: Hardware, *, huge_pages: Path) -> list[Axis]:
    """Return the axes of huge pages (a mapped file has none; weights read or repacked may) and of waiting threads."""
    if not sys.platform.startswith("linux"):
        return []
    changes: list[Change] = []
    reads = hardware.memory_available > _COPIES * header.weight_bytes
    match = re.search(r"\[(\w+)\]", read_text(huge_pages))
    policy = match[1] if match else "never"
    if policy == "madvise":  # on request
        changes.append((("huge_pages", True),))
        if reads:
            changes.append((("huge_pages", True), ("mmap", False)))
    elif policy == "always" and reads:
        changes.append((("mmap", False),))
    memory = [Axis("huge pages", tuple(changes), (DECODE, PREFILL))] if changes else []
    return [*memory, Axis("waiting", _values("spins", _SPINS), (DECODE,), wants_quiet=True)]


def _values(name: str, values: Sequence[Any]) -> tuple[Change, ...]:
    return tuple(((name, value),) for value in values)


SECONDS = 60.0
LEAST_DEPTH, MOST_DEPTH = 1024, 2048
"""Tokens. The gain of attention over fewer says nothing about conversations: it can be the other way round."""
_SEARCH_SHARE, _TOTAL_SHARE = 0.67, 0.96  # of the time, when sweep and confirmation end
_CALIBRATION_SHARE = 0.4
_PREFILL_SHARE, _DECODE_SHARE = 1 / 160, 1 / 400  # of the time, for one measurement
_DEPTH_SHARES = {MOST_DEPTH: 1 / 16, LEAST_DEPTH: 1 / 8}  # at most, for the prefill of a depth
_SWEEP_ROUNDS, _CONFIRM_ROUNDS = (2, 8), (3, 20)  # minimum and maximum
_MATTERS = 1.01  # the smallest ratio worth a change
_DISTURBED = 0.85  # of the rate seen before: the measurement is repeated
_BATCH = 512
_SETUP_SECONDS = 0.55  # of starting an engine, besides loading

_Rates = Mapping[tuple[TunableSettings, str], list[float]]


class TuneBackend(Protocol):
    """Engines to measure with."""

    def rates(self, settings: TunableSettings, test: BenchTest, repetitions: int) -> tuple[float, ...]:
        """Return the tokens/s of each repetition.

        Raises:
            LlmrunError: the model can't be loaded, or computed with, under these settings.
        """

    def pending(self, settings: TunableSettings, depth: int) -> tuple[bool, bool]:
        """Return whether a measurement would load the model first, and prefill `depth` tokens."""

    def load_seconds(self, settings: TunableSettings) -> float:
        """Return the load time with settings measured before."""

    def was_busy(self) -> bool:
        """Return whether other programs computed since the last call."""

    def clock(self) -> float:
        """Return monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed of one thing divided by that of another, with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of one change."""

    change: str  # e.g. "repack off"
    goal: str  # PREFILL or DECODE
    verdict: str  # "faster" (and adopted), "slower", "no difference", "unclear", "failed", "no time", "busy"
    ratio: Ratio | None = None  # to the best settings before; None where it was not measured
    depth: int = 0  # tokens in the context


@dataclass(frozen=True, slots=True)
class TuneProgress:
    """The current measurement, in words, and the seconds passed."""

    what: str
    seconds: float


Step = TuneProgress | Trial


@dataclass(frozen=True, slots=True)
class Improvement:
    """Settings compared with the default. The profile counts only gains that are certain."""

    profile: Profile
    prefill: Verdict
    decode: Verdict

    @property
    def is_faster(self) -> bool:
        """Significantly faster in prefill or decode."""
        return "faster" in (self.prefill.kind, self.decode.kind)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data."""
        return {**as_dict(self), "profile": self.profile.to_json()}


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Everything a search found."""

    tuned: TunedSettings
    compared: tuple[Improvement, ...]  # tuned.others, with their comparison
    unsure: tuple[Improvement, ...]  # found by the sweep, not confirmed
    tried: tuple[Trial, ...]
    prefill_test: BenchTest  # of the final figures
    decode_test: BenchTest
    seconds: float
    warnings: tuple[BenchWarning, ...] = ()  # disturbances meanwhile


def search(
    machine: TuneBackend,
    default: TunableSettings,
    axes: Sequence[Axis],
    *,
    seconds: float = SECONDS,
    depth: int | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> SearchResult:
    """Search for faster settings than the default.

    Args:
        axes: in the order to try them.
        seconds: the time limit; a measurement that has begun is finished.
        depth: tokens in the context while attention is measured; None: LEAST_DEPTH to MOST_DEPTH as the time allows.

    Raises:
        UsageError: the time is too short for this model.
        LlmrunError: the default settings do not work.
    """
    sweep = _Sweep(machine, default, seconds, on_step)
    sweep.calibrate(depth)
    steps = [(axis, goal) for axis in axes for goal in axis.goals]
    for index, (axis, goal) in enumerate(steps):
        sweep.sweep(axis, goal, share=min(1.0, 2 / (len(steps) - index)))
    compared = sweep.confirm()
    faster = tuple(improvement for improvement in compared if improvement.is_faster)
    unsure = tuple(improvement for improvement in compared if not improvement.is_faster)
    prefill, decode = sweep.tests[PREFILL], sweep.tests[DECODE]
    others = tuple(improvement.profile for improvement in faster)
    tuned = TunedSettings(sweep.profile(default), others, decode.n_depth, time.time())
    return SearchResult(tuned, faster, unsure, tuple(sweep.tried), prefill, decode, sweep.passed)


class _Sweep:
    def __init__(
        self, machine: TuneBackend, default: TunableSettings, seconds: float, on_step: Callable[[Step], None]
    ) -> None:
        self._machine, self._default, self._seconds, self._on_step = machine, default, seconds, on_step
        self._began = machine.clock()
        self._best = {PREFILL: default, DECODE: default}
        self._default_rates: defaultdict[BenchTest, list[float]] = defaultdict(list)
        self._fastest: dict[tuple[TunableSettings, BenchTest], float] = {}
        self._speed = {PREFILL: 1.0, DECODE: 1.0}
        self._slack = 1.0  # measured over expected time, smoothed
        self.tests = {PREFILL: BenchTest(n_prompt=_BATCH), DECODE: BenchTest(n_gen=4)}
        self.tried: list[Trial] = []

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return self._machine.clock() - self._began

    def calibrate(self, depth: int | None) -> None:
        """Choose the sizes of the tests so that the sweep fits into the time."""
        self._on_step(TuneProgress("the default settings", self.passed))
        for goal, test in ((PREFILL, BenchTest(n_prompt=32)), (DECODE, BenchTest(n_gen=4))):
            self._speed[goal] = max(self._machine.rates(self._default, test, 2))
        if self.passed > self._seconds * _CALIBRATION_SHARE:
            raise UsageError(
                f"{self._seconds:g} seconds are not enough for this model",
                why=f"loading it and computing a few tokens took {self.passed:.0f} of them",
                hint=f"--seconds {math.ceil(1.5 * self.passed / _CALIBRATION_SHARE / 30) * 30}",
            )
        prefill, decode = (self._speed[goal] * self._seconds for goal in (PREFILL, DECODE))
        n_prompt = 32 if prefill / 40 < 64 else _multiple(prefill * _PREFILL_SHARE, 64, 64, _BATCH)
        affordable = [tokens for tokens, share in _DEPTH_SHARES.items() if prefill * share >= tokens]
        self._has_depth = depth is not None or bool(affordable)
        self._depth = max(affordable, default=0) if depth is None else depth
        n_gen = _multiple(decode * _DECODE_SHARE, 4, 4, 64)
        self.tests = {PREFILL: BenchTest(n_prompt=n_prompt), DECODE: BenchTest(n_gen=n_gen)}

    def sweep(self, axis: Axis, goal: str, share: float) -> None:
        """Measure the candidates of one axis beside the best settings, and adopt the fastest if it is faster.

        Args:
            share: of the time left.
        """
        base = self._best[goal]
        candidates = axis.rivals(base)
        n_prompt = _whole_batch((base, *candidates)) if axis.whole_batch else 0
        test = self._test(goal, at_depth=axis.at_depth, n_prompt=n_prompt)
        if axis.wants_quiet and self._machine.was_busy():
            self._skip(candidates.values(), goal, "busy")
            return
        rates: _Rates = defaultdict(list)
        if self._has_depth or not axis.at_depth:
            latest = min(
                self._confirmation_start({**self._best, goal: candidate}, axis) for candidate in (base, *candidates)
            )
            limit = self.passed + (latest - self.passed) * share
            rates = self._rounds(base, candidates, {goal: test}, _SWEEP_ROUNDS, (latest, limit), drops=True)
        if axis.wants_quiet and self._machine.was_busy():
            self._skip(candidates.values(), goal, "busy")
            return
        verdicts = {
            candidate: _verdict(rates, base, candidate, goal)
            for candidate in candidates
            if len(rates[candidate, goal]) > 1
        }
        faster = [candidate for candidate, verdict in verdicts.items() if _is_promising(verdict)]
        failed = {trial.change for trial in self.tried if trial.verdict == "failed"}
        for candidate, change in candidates.items():
            if candidate in verdicts:
                verdict = verdicts[candidate]
                ratio = Ratio(verdict.ratio, verdict.low, verdict.high)
                self._report(Trial(change, goal, _words(verdict), ratio, test.n_depth))
            elif change not in failed:
                self._report(Trial(change, goal, "no time"))
        self._best[goal] = max(faster, key=lambda candidate: verdicts[candidate].ratio, default=base)

    def confirm(self) -> list[Improvement]:
        """Measure the settings found in turns with the default; measurements of the sweep do not count."""
        candidates, default = self._candidates(self._best), self._default
        self.tests = self._final_tests(candidates)
        changes = {candidate: ", ".join(candidate.changes(default)) for candidate in candidates}
        limit = self._seconds * _TOTAL_SHARE
        rates = self._rounds(default, changes, self.tests, _CONFIRM_ROUNDS, (limit, limit), drops=False)
        for test in self.tests.values():
            if not self._default_rates[test]:
                self._measure(default, test)
        improvements = []
        for candidate in candidates:
            if len(rates[candidate, DECODE]) < 2:
                self._skip([changes[candidate]], PREFILL, "no time")
                continue
            verdicts = {goal: _verdict(rates, default, candidate, goal) for goal in self.tests}
            profile = self.profile(candidate, {goal: _certain(verdict) for goal, verdict in verdicts.items()})
            improvements.append(Improvement(profile, verdicts[PREFILL], verdicts[DECODE]))
        return improvements

    def profile(self, settings: TunableSettings, ratios: Mapping[str, float] | None = None) -> Profile:
        """Return settings with the default's rates times these ratios."""
        rates = [statistics.median(self._default_rates[test]) for test in self.tests.values()]
        if ratios:
            rates = [rate * ratios[goal] for rate, goal in zip(rates, self.tests, strict=True)]
        return Profile(settings, self._machine.load_seconds(settings), *rates)

    # ---- measuring ---------------------------------------------------------------------------------

    def _rounds(
        self,
        base: TunableSettings,
        candidates: Mapping[TunableSettings, str],
        tests: Mapping[str, BenchTest],
        bounds: tuple[int, int],
        limits: tuple[float, float],
        *,
        drops: bool,
    ) -> _Rates:
        """Return the rates of base and candidates, measured in turns.

        Args:
            bounds: minimum and maximum of rounds.
            limits: seconds at which the minimum and further rounds have to be done.
            drops: stop measuring candidates that are hopeless, and all when all others are clearly faster.
        """
        rates: _Rates = defaultdict(list)
        alive = list(candidates)
        for number in range(bounds[1]):
            cost = sum(self._cost(settings, test) for test in tests.values() for settings in (base, *alive))
            if not alive or self.passed + cost > limits[number >= bounds[0]]:
                break
            label = f"{' or '.join(candidates[settings] for settings in alive)} ({', '.join(tests)})"
            self._on_step(TuneProgress(label, self.passed))
            for goal, test in tests.items():
                for settings in (base, *alive) if number % 2 == 0 else (*alive[::-1], base):
                    try:
                        rates[settings, goal].append(self._measure(settings, test))
                    except (BadModelError, EngineCrashedError, ResourceError, UsageError):
                        if settings == base or not drops:
                            raise
                        self._report(Trial(candidates[settings], goal, "failed"))
                        alive.remove(settings)
            if drops and number:
                verdicts = {settings: _verdict(rates, base, settings, goal) for settings in alive for goal in tests}
                (goal,) = tests
                pairs = {settings: zip(rates[settings, goal], rates[base, goal], strict=False) for settings in alive}
                alive = [
                    settings for settings in alive if max(mine / other for mine, other in pairs[settings]) >= _MATTERS
                ]
                if all(verdicts[settings].kind == "faster" for settings in alive):
                    break
        return rates

    def _measure(self, settings: TunableSettings, test: BenchTest) -> float:
        """Return tokens/s; a measurement much slower than one before was disturbed, and is repeated once."""
        rate = self._measure_once(settings, test)
        before = self._fastest.get((settings, test), 0.0)
        if rate < _DISTURBED * before:
            rate = max(rate, self._measure_once(settings, test))
        self._fastest[settings, test] = max(rate, before)
        if settings == self._default:
            self._default_rates[test].append(rate)
        return rate

    def _measure_once(self, settings: TunableSettings, test: BenchTest) -> float:
        expected, began = self._cost(settings, test), self._machine.clock()
        rate = max(self._machine.rates(settings, test, _repetitions(test)))
        took = self._machine.clock() - began
        self._slack = min(max(1.0, self._slack * (0.7 + 0.3 * took / expected)), 10.0)
        return rate

    def _cost(self, settings: TunableSettings, test: BenchTest, rounds: int = 1) -> float:
        """Return the seconds that measurements are expected to take."""
        loads, fills = self._machine.pending(settings, test.n_depth)
        once = (_SETUP_SECONDS + self._machine.load_seconds(self._default)) * loads
        once += test.n_depth / self._speed[PREFILL] * fills
        compute = test.n_prompt / self._speed[PREFILL] + test.n_gen / self._speed[DECODE]
        return (once + rounds * (_repetitions(test) * compute + 0.05)) * self._slack

    # ---- the confirmation --------------------------------------------------------------------------

    def _confirmation_start(self, best: Mapping[str, TunableSettings], axis: Axis) -> float:
        """Return the seconds at which the sweep has to end to confirm these settings."""
        candidates = self._candidates(best)
        tests = self._final_tests(candidates, at_depth=axis.at_depth, whole_batch=axis.whole_batch).values()
        costs = (
            self._cost(settings, test, _CONFIRM_ROUNDS[0])
            for settings in (self._default, *candidates)
            for test in tests
        )
        return min(self._seconds * _SEARCH_SHARE, self._seconds * _TOTAL_SHARE - sum(costs))

    def _candidates(self, best: Mapping[str, TunableSettings]) -> list[TunableSettings]:
        """Return the best for each goal, with the other's settings that do not affect its own goal."""
        prefill, decode = best[PREFILL], best[DECODE]
        merged = (
            replace(prefill, threads=decode.threads),
            replace(decode, threads_batch=prefill.threads_batch, n_ubatch=prefill.n_ubatch),
        )
        return [settings for settings in dict.fromkeys(merged) if settings != self._default]

    def _final_tests(
        self, candidates: Sequence[TunableSettings], *, at_depth: bool = False, whole_batch: bool = False
    ) -> dict[str, BenchTest]:
        """Return the tests that show the candidates' changes: at depth for attention, whole batches for n_ubatch."""
        default = self._default
        attention = {(settings.flash_attention, settings.kv_type_v) for settings in candidates}
        at_depth = at_depth or not attention <= {(default.flash_attention, default.kv_type_v)}
        whole_batch = whole_batch or any(settings.n_ubatch != default.n_ubatch for settings in candidates)
        n_prompt = _whole_batch((default, *candidates)) if whole_batch else 0
        return {PREFILL: self._test(PREFILL, n_prompt=n_prompt), DECODE: self._test(DECODE, at_depth=at_depth)}

    def _test(self, goal: str, *, at_depth: bool = False, n_prompt: int = 0) -> BenchTest:
        test = replace(self.tests[goal], n_depth=self._depth) if at_depth else self.tests[goal]
        return replace(test, n_prompt=n_prompt) if n_prompt and goal == PREFILL else test

    # ---- reporting ---------------------------------------------------------------------------------

    def _skip(self, changes: Iterable[str], goal: str, reason: str) -> None:
        for change in changes:
            self._report(Trial(change, goal, reason))

    def _report(self, trial: Trial) -> None:
        self.tried.append(trial)
        self._on_step(trial)


def _whole_batch(settings: Iterable[TunableSettings]) -> int:
    """Return the tokens of a prompt that fills a micro-batch of each."""
    return max(_BATCH, *(candidate.n_ubatch for candidate in settings))


def _verdict(rates: _Rates, base: TunableSettings, candidate: TunableSettings, goal: str) -> Verdict:
    samples = rates[candidate, goal]
    return compare(rates[base, goal][: len(samples)], samples, paired=True)


def _is_promising(verdict: Verdict) -> bool:
    """Return whether a candidate is faster by its standard error, and by enough to matter: the confirmation decides."""
    error = math.log(verdict.high / verdict.low) / 2 / student(verdict.samples[0] - 1)
    return verdict.ratio > _MATTERS and math.log(verdict.ratio) > error


def _certain(verdict: Verdict) -> float:
    """Return the ratio to count on: uncertain gains are none."""
    if verdict.is_different:
        return verdict.ratio
    return 1.0 if verdict.kind == "same" else min(verdict.ratio, 1.0)


def _words(verdict: Verdict) -> str:
    if _is_promising(verdict):
        return "faster"
    return {"same": "no difference", "slower": "slower"}.get(verdict.kind, "unclear")


def _repetitions(test: BenchTest) -> int:
    return 2 if test.n_gen else 1


def _multiple(value: float, step: int, low: int, high: int) -> int:
    """Return the largest multiple of step up to value, within bounds."""
    return min(max(int(value / step) * step, low), high)


SECONDS_BOUNDS = (10.0, 3600.0)
_MOST_ENGINES = 4
_PROCESS_BYTES = 400 << 20  # of an engine besides its weights: KV cache, scratch memory, Python


class EngineBackend:
    """A TuneBackend of real engines: one for each way of loading, so that two of them can take turns.

    Args:
        load: the model, with default settings.
        n_engines: that fit into memory together.
    """

    def __init__(self, load: Load, n_engines: int) -> None:
        self.clock = time.monotonic
        self._load = load
        self._engines = EnginePool(lambda environment: EngineClient(launch(environment=environment)), n_engines)
        self._depths: dict[TunableSettings, int] = {}  # tokens in the KV state that an engine holds
        self._load_seconds: dict[TunableSettings, float] = {}
        self._watch = DisturbanceMonitor().__enter__()

    def rates(self, settings: TunableSettings, test: BenchTest, repetitions: int) -> tuple[float, ...]:
        key, load = _engine_key(settings), settings.applied(self._load)
        is_new = key not in self._engines
        engine = self._engines.engine(key, settings.environment)
        try:
            if is_new:  # one token touches all weights, so that no measurement waits for their pages
                self._depths[key] = 0
                engine.do(BENCH, Bench(load, BenchTest(n_gen=1), 1, warm_up=False))
            done = engine.do(BENCH, Bench(load, test, repetitions, warm_up=not test.n_prompt))
        except BaseException:
            self._engines.drop(key)
            raise
        self._depths[key] = test.n_depth or self._depths[key]
        self._load_seconds[key] = min(done.load_ns / 1e9, self._load_seconds.get(key, math.inf))
        return tuple(1e9 * test.n_tokens / repetition.ns for repetition in done.repetitions)

    def pending(self, settings: TunableSettings, depth: int) -> tuple[bool, bool]:
        key = _engine_key(settings)
        is_new = key not in self._engines
        return is_new, depth > 0 and (is_new or self._depths[key] != depth)

    def load_seconds(self, settings: TunableSettings) -> float:
        return self._load_seconds[_engine_key(settings)]

    def was_busy(self) -> bool:
        watch, self._watch = self._watch, DisturbanceMonitor().__enter__()
        watch.__exit__()
        return bool(watch.warnings)

    def close(self) -> None:
        self._engines.close()


def _engine_key(settings: TunableSettings) -> TunableSettings:
    """Return what needs an engine of its own: settings of loading, and of the form of the KV state."""
    return replace(settings, threads=0, threads_batch=0, n_ubatch=0)


def count_engines(header: Header, hardware: Hardware, plan: Plan) -> int:
    """Return the number of engines whose models fit into memory together, at least 1."""
    room = hardware.memory_available - margin(hardware.memory_available)
    counts = [_MOST_ENGINES, room // (header.weight_bytes + _PROCESS_BYTES)]
    if on_gpus := dict(plan.gpu_bytes):  # a split mode may put all of a model on one GPU
        free = min(gpu.memory_free for gpu in hardware.gpus if gpu.name in on_gpus)
        counts.append(free // max(sum(on_gpus.values()), 1))
    return max(1, min(counts))


def tune(
    header: Header,
    hardware: Hardware,
    plan: Plan,
    *,
    seconds: float,
    depth: int | None = None,
    kv: bool = False,
    on_step: Callable[[Step], None] = lambda step: None,
) -> SearchResult:
    """Search for faster settings than the plan's, without remembering them.

    Args:
        plan: with the default settings.
        seconds: the time limit.
        depth: tokens in the context while attention is measured; None: as many as the time allows.
        kv: try a quantized KV cache too, which loses precision.

    Raises:
        UsageError: seconds or depth are out of bounds, or the time is too short for this model.
        LlmrunError: the model can't be loaded.
    """
    check_preferences(seconds, depth, plan.load.n_ctx)
    load = plan.load
    default = TunableSettings.of(load)
    machine = EngineBackend(load, count_engines(header, hardware, plan))
    with closing(machine), DisturbanceMonitor() as watch:
        n_gpus = len(plan.gpu_bytes)
        variants = _cpu_variants()
        axes = axes_for(header, hardware, default, kv=kv, n_batch=load.n_batch, n_gpus=n_gpus, cpu_variants=variants)
        result = search(machine, default, axes, seconds=seconds, depth=depth, on_step=on_step)
    return replace(result, warnings=watch.warnings)


def _cpu_variants() -> tuple[str, ...]:
    """Return the variants to compare, ggml's choice first; none where there is one, or LLMRUN_CPU has chosen."""
    if os.environ.get("LLMRUN_CPU") or not has_variants():
        return ()
    with closing(EngineClient()) as engine:
        return engine.do(CPU_VARIANTS, Empty())


def check_preferences(seconds: float, depth: int | None, n_ctx: int = CONTEXT_BOUNDS[1]) -> None:
    """Check the preferences of tune().

    Args:
        n_ctx: the model's context window, where it is known.

    Raises:
        UsageError: one is out of bounds.
    """
    require_within("--seconds", seconds, SECONDS_BOUNDS)
    require_within("--depth", depth, (0, n_ctx // 2))


def keep(result: SearchResult, header: Header, hardware: Hardware, folder: Path, name: str = "") -> TunedSettings:
    """Remember the tuned settings, and return what is remembered now.

    A noisy search that found nothing does not replace settings known from before.

    Args:
        name: the model's, for display.

    Raises:
        LlmrunError: the folder can't be written.
    """
    tuned, before = result.tuned, remembered(header, hardware, folder)
    if result.warnings and not tuned.others and before is not None and before.others:
        return before
    remember(tuned, header, hardware, folder, name)
    return tuned

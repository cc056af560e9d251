"""Finds fast settings in little time: one setting after another, each against the best so far, in turns.

Owns the order, how long is measured and what is kept; must not know engines (measure.py) nor how it is shown. Prefill
and decode are two searches, since they want different settings. The scatter of a busy machine is met by pairs that are
measured right after each other; what was found is measured again beside the default, and only what is significantly
faster there is kept.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from llmrun.bench.statistics import Verdict, compare
from llmrun.bench.tune.axes import DECODE, PREFILL, Axis
from llmrun.bench.tune.ratios import Ratio, Scatter
from llmrun.errors import BadModelError, EngineCrashedError, ResourceError, UsageError
from llmrun.planning.settings import EngineSettings
from llmrun.planning.tuned import Profile, TunedSettings
from llmrun.protocol.jobs.bench import BenchTest

SECONDS = 60.0
LEAST_DEPTH, MOST_DEPTH = 1024, 2048
"""Tokens. What attention gains in front of fewer says nothing about conversations: it can be the other way round."""
_SEARCH_SHARE = 0.67  # of the time; the rest is for the comparison with the default
_ALL = 0.96  # of the time; what is measured last may take longer than expected
_MOST_ROUNDS = 8
_MOST_PAIRS = 20
_FEWEST_ROUNDS = 2
_FEWEST_CONFIRMED = 3
_REPEATED_SHARE = 0.25  # of all measurements
_DISTURBED = 0.85  # of the speed that was seen before
_MATTERS = 1.01
_HOPELESS = 0.75
_PREFILL_SHARE, _DECODE_SHARE, _DEPTH_SHARE = 1 / 120, 1 / 300, 1 / 8  # of the time, for one measurement
_CALIBRATION_SHARE = 0.4
_SPARE = 1.5  # other programs may be busier the next time
_LONGEST_SHARE = 1 / 40
_LEAST_PROMPT = 32
_BATCH = 512
_START_SECONDS = 0.5  # of an engine
_OVERHEAD_SECONDS = 0.05  # of a measurement: context, threads, the pipe


class TuneBackend(Protocol):
    """What can be measured."""

    def rates(self, settings: EngineSettings, test: BenchTest, repetitions: int) -> tuple[float, ...]:
        """Tokens/s of each repetition.

        Raises:
            LlmrunError: it does not work with these settings.
        """

    def pending(self, settings: EngineSettings, depth: int) -> tuple[bool, bool]:
        """Whether the model would have to be loaded, and that many tokens to be prefilled, before a measurement."""

    def load_seconds(self, settings: EngineSettings) -> float:
        """How long loading with these settings took; they were measured before."""

    def was_busy(self) -> bool:
        """Whether other programs computed since this was asked before."""

    def clock(self) -> float:
        """Monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Trial:
    """How one change did.

    Attributes:
        change: in words, e.g. "repack off".
        goal: PREFILL or DECODE.
        verdict: "faster" (and kept), "slower", "no difference", "unclear", "failed", "no time", or "busy": other
            programs computed, which changes what is best.
        ratio: to the best before; None where it was not measured.
        depth: tokens that were in the context.
    """

    change: str
    goal: str
    verdict: str
    ratio: Ratio | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class TuneProgress:
    """What is being measured now, in words, and how many seconds have passed."""

    what: str
    seconds: float


Step = TuneProgress | Trial


@dataclass(frozen=True, slots=True)
class Improvement:
    """Settings beside the default: what to count on, and the comparison as it was."""

    profile: Profile
    prefill: Verdict
    decode: Verdict

    @property
    def is_faster(self) -> bool:
        """Significantly, in one of the two: worth keeping."""
        return "faster" in (self.prefill.kind, self.decode.kind)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What the search came to.

    Attributes:
        tuned: what is worth remembering.
        compared: its profiles that are not the default, as they were confirmed.
        unsure: what the search took for faster, and the comparison did not confirm.
        tried: every change.
        prefill_test: with which the final figures were measured.
        decode_test: the same.
        seconds: that it took.
    """

    tuned: TunedSettings
    compared: tuple[Improvement, ...]
    unsure: tuple[Improvement, ...]
    tried: tuple[Trial, ...]
    prefill_test: BenchTest
    decode_test: BenchTest
    seconds: float


def search(
    machine: TuneBackend,
    default: EngineSettings,
    axes: Sequence[Axis],
    *,
    seconds: float = SECONDS,
    depth: int | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> SearchResult:
    """Look for faster settings than the default.

    Args:
        axes: what to try, in this order.
        seconds: after which it is over; a measurement that has begun is finished.
        depth: tokens in the context while attention matters; None is what the time allows, LEAST_DEPTH to MOST_DEPTH.

    Raises:
        UsageError: the time is too short for this model.
        LlmrunError: the default settings do not work.
    """
    return _Search(machine, default, seconds, on_step).run(axes, depth)


class _Search:
    def __init__(
        self, machine: TuneBackend, default: EngineSettings, seconds: float, on_step: Callable[[Step], None]
    ) -> None:
        self._machine = machine
        self._default = default
        self._began = machine.clock()
        self._seconds = seconds
        self._on_step = on_step
        self._best = {PREFILL: default, DECODE: default}
        self._scatter = {PREFILL: Scatter(), DECODE: Scatter()}
        self._rates: defaultdict[tuple[EngineSettings, BenchTest], list[float]] = defaultdict(list)
        self._tried: list[Trial] = []
        self._speed = {PREFILL: 1.0, DECODE: 1.0}
        self._races = self._measured = self._repeated = 0
        self._slack = 1.0
        self._tries_attention = True

    def run(self, axes: Sequence[Axis], depth: int | None) -> SearchResult:
        self._calibrate(depth)
        self._descend(axes)
        compared = self._confirm()
        default = self._profile(self._default, {PREFILL: 1.0, DECODE: 1.0})
        kept = tuple(each for each in compared if each.is_faster)
        unsure = tuple(each for each in compared if not each.is_faster)
        tuned = TunedSettings(default, tuple(each.profile for each in kept), self._tests[DECODE].n_depth, time.time())
        return SearchResult(
            tuned, kept, unsure, tuple(self._tried), self._tests[PREFILL], self._tests[DECODE], self._passed
        )

    # ---- sizes -------------------------------------------------------------------------------------

    def _calibrate(self, depth: int | None) -> None:
        """How much fits into the time: a few tokens show how fast this is at all."""
        self._on_step(TuneProgress("the default settings", self._passed))
        for goal, test in ((PREFILL, BenchTest(n_prompt=32)), (DECODE, BenchTest(n_gen=4))):
            self._speed[goal] = max(self._machine.rates(self._default, test, 2))
        if self._passed > self._seconds * _CALIBRATION_SHARE:
            raise UsageError(
                f"{self._seconds:g} seconds are not enough for this model",
                why=f"loading it and computing a few tokens took {self._passed:.0f} of them",
                hint=f"--seconds {math.ceil(_SPARE * self._passed / _CALIBRATION_SHARE / 30) * 30}",
            )
        prefill, decode = self._speed[PREFILL], self._speed[DECODE]
        n_prompt = _step_down(prefill * self._seconds * _PREFILL_SHARE, 64, 128, _BATCH)
        n_gen = _step_down(decode * self._seconds * _DECODE_SHARE, 4, 4, 64)
        while n_prompt > _LEAST_PROMPT and n_prompt / prefill > self._seconds * _LONGEST_SHARE:
            n_prompt //= 2
        if depth is None:
            depth = _step_down(prefill * self._seconds * _DEPTH_SHARE, LEAST_DEPTH, 0, MOST_DEPTH)
            self._tries_attention = depth > 0
        self._depth = depth
        self._tests = {PREFILL: BenchTest(n_prompt=n_prompt), DECODE: BenchTest(n_gen=n_gen)}

    def _test(self, axis: Axis, goal: str) -> BenchTest:
        test = self._tests[goal]
        if axis.at_depth:
            test = replace(test, n_depth=self._depth)
        return replace(test, n_prompt=_BATCH) if axis.whole_batch and goal == PREFILL else test

    # ---- time --------------------------------------------------------------------------------------

    @property
    def _passed(self) -> float:
        return self._machine.clock() - self._began

    def _cost(self, settings: EngineSettings, test: BenchTest, rounds: int = 1) -> float:
        """Seconds that measurements will take, by what the others took."""
        loads, fills = self._machine.pending(settings, test.n_depth)
        compute = test.n_prompt / self._speed[PREFILL] + test.n_gen / self._speed[DECODE]
        once = test.n_depth / self._speed[PREFILL] * fills
        once += (_START_SECONDS + self._machine.load_seconds(self._default)) * loads
        return (once + rounds * (_repetitions(test) * compute + _OVERHEAD_SECONDS)) * self._slack

    def _measure(self, settings: EngineSettings, test: BenchTest) -> float:
        """Tokens/s. What was much faster before has been disturbed, and is measured once more."""
        rate = self._measure_once(settings, test)
        seen = self._rates[settings, test]
        if rate < _DISTURBED * max(seen, default=0.0) and self._repeated < _REPEATED_SHARE * self._measured:
            self._repeated += 1
            rate = max(rate, self._measure_once(settings, test))
        seen.append(rate)
        self._measured += 1
        return rate

    def _measure_once(self, settings: EngineSettings, test: BenchTest) -> float:
        expected = self._cost(settings, test)
        began = self._machine.clock()
        rate = max(self._machine.rates(settings, test, _repetitions(test)))
        took = self._machine.clock() - began
        self._slack = min(max(1.0, 0.7 * self._slack + 0.3 * self._slack * took / expected), 10.0)
        return rate

    # ---- one setting after another -----------------------------------------------------------------

    def _descend(self, axes: Sequence[Axis]) -> None:
        """Every axis once; then, while there is time, those again whose base has changed since."""
        based_on: dict[tuple[str, str], EngineSettings] = {}
        for _ in range(2):
            steps = [(axis, goal) for axis in axes for goal in axis.goals]
            steps = [(axis, goal) for axis, goal in steps if based_on.get((axis.name, goal)) != self._best[goal]]
            first_pass = not based_on
            for index, (axis, goal) in enumerate(steps):
                left = self._search_ends(axis, goal) - self._passed
                self._race(axis, goal, left * min(1.0, 2 / (len(steps) - index)), says_skipped=first_pass)
                based_on[axis.name, goal] = self._best[goal]

    def _race(self, axis: Axis, goal: str, seconds: float, *, says_skipped: bool) -> None:
        """Measure the values of one axis in turns with the best so far, until it is clear which is the fastest."""
        incumbent, test = self._best[goal], self._test(axis, goal)
        rivals = axis.rivals(incumbent)
        if self._machine.was_busy() and axis.wants_quiet:
            self._skip(rivals, goal, "busy")
            return
        if axis.at_depth and not self._tries_attention:
            if says_skipped:
                self._skip(rivals, goal, "no time")
            return
        ends = self._passed + seconds
        logs: dict[EngineSettings, list[float]] = {rival: [] for rival in rivals}
        keys = {rival: (self._races, number) for number, rival in enumerate(rivals)}
        self._races += 1
        alive = list(rivals)
        for number in range(_MOST_ROUNDS):
            if not alive:
                break
            latest = ends if number >= _FEWEST_ROUNDS else self._search_ends(axis, goal)
            if self._passed + self._round_cost([incumbent, *alive], test) > latest:
                break
            self._on_step(TuneProgress(f"{' or '.join(rivals[rival] for rival in alive)} ({goal})", self._passed))
            order = [incumbent, *alive] if number % 2 == 0 else [*alive[::-1], incumbent]
            rates, alive = self._round(order, incumbent, test, goal, rivals)
            for rival in alive:
                logs[rival].append(math.log(rates[rival] / rates[incumbent]))
                self._scatter[goal].note(keys[rival], logs[rival])
            alive = [rival for rival in alive if not self._is_hopeless(logs[rival], goal)]
            if number + 1 >= _FEWEST_ROUNDS and all(self._ratio(logs[rival], goal).is_faster for rival in alive):
                break
        if axis.wants_quiet and self._machine.was_busy():
            self._skip(rivals, goal, "busy")
        else:
            self._judge(goal, rivals, logs, test, says_skipped=says_skipped)

    def _search_ends(self, axis: Axis, goal: str) -> float:
        """When the comparison with the default has to begin, if this axis changes something."""
        rivals = [self._best[goal]] if axis.at_depth else [self._best[goal], *axis.rivals(self._best[goal])]
        last = max(self._final_cost(self._candidates({**self._best, goal: rival}), axis) for rival in rivals)
        return min(self._seconds * _SEARCH_SHARE, self._seconds * _ALL - last)

    def _final_cost(self, candidates: Sequence[EngineSettings], axis: Axis | None = None) -> float:
        """Seconds that the shortest comparison takes, if this axis changes something."""
        tests = self._final_tests(candidates)
        if axis is not None and axis.whole_batch:
            tests[PREFILL] = replace(tests[PREFILL], n_prompt=_BATCH)
        if axis is not None and axis.at_depth:
            tests[DECODE] = replace(tests[DECODE], n_depth=self._depth)
        everyone = [self._default, *candidates]
        return sum(self._cost(each, test, _FEWEST_CONFIRMED) for each in everyone for test in tests.values())

    def _skip(self, rivals: Mapping[EngineSettings, str], goal: str, why: str) -> None:
        for change in rivals.values():
            self._say(Trial(change, goal, why))

    def _round_cost(self, settings: Sequence[EngineSettings], test: BenchTest) -> float:
        return sum(self._cost(each, test) for each in settings)

    def _round(
        self,
        order: Sequence[EngineSettings],
        incumbent: EngineSettings,
        test: BenchTest,
        goal: str,
        rivals: dict[EngineSettings, str],
    ) -> tuple[dict[EngineSettings, float], list[EngineSettings]]:
        """Rates of all that work, and which rivals those are."""
        rates = {}
        for settings in order:
            try:
                rates[settings] = self._measure(settings, test)
            except (BadModelError, EngineCrashedError, ResourceError):
                if settings == incumbent:
                    raise
                self._say(Trial(rivals[settings], goal, "failed"))
        return rates, [settings for settings in order if settings != incumbent and settings in rates]

    def _ratio(self, logs: Sequence[float], goal: str) -> Ratio:
        return self._scatter[goal].ratio(logs)

    def _is_hopeless(self, logs: Sequence[float], goal: str) -> bool:
        """Whether it can't be faster by enough to matter. One pair alone may have been disturbed."""
        ratio = self._ratio(logs, goal)
        return ratio.high < _MATTERS if len(logs) >= _FEWEST_ROUNDS else ratio.high < _HOPELESS

    def _judge(
        self,
        goal: str,
        rivals: dict[EngineSettings, str],
        logs: dict[EngineSettings, list[float]],
        test: BenchTest,
        *,
        says_skipped: bool,
    ) -> None:
        """Keep the fastest rival if it is significantly faster, and say how all of them did."""
        ratios = {rival: self._ratio(found, goal) for rival, found in logs.items() if found}
        faster = [rival for rival, ratio in ratios.items() if ratio.is_probably_faster]
        winner = max(faster, key=lambda rival: ratios[rival].mean, default=None)
        failed = {tried.change for tried in self._tried if tried.verdict == "failed"}
        for rival, change in rivals.items():
            if rival in ratios:
                self._say(Trial(change, goal, _verdict(ratios[rival]), ratios[rival], test.n_depth))
            elif says_skipped and change not in failed:
                self._say(Trial(change, goal, "no time"))
        if winner is not None:
            self._best[goal] = winner

    def _say(self, tried: Trial) -> None:
        self._tried.append(tried)
        self._on_step(tried)

    # ---- beside the default ------------------------------------------------------------------------

    def _candidates(self, best: Mapping[str, EngineSettings]) -> list[EngineSettings]:
        """What the two searches found, each with the other's settings that its own goal does not depend on."""
        prefill, decode = best[PREFILL], best[DECODE]
        merged = (
            replace(prefill, threads=decode.threads),
            replace(decode, threads_batch=prefill.threads_batch, n_ubatch=prefill.n_ubatch),
        )
        return [settings for settings in dict.fromkeys(merged) if settings != self._default]

    def _confirm(self) -> list[Improvement]:
        """Measure what was found in turns with the default; nothing of the search counts here."""
        candidates = self._affordable()
        if not candidates:
            self._measure_default()
            return []
        self._tests = self._final_tests(candidates)
        everyone = [self._default, *candidates]
        rates: dict[tuple[EngineSettings, str], list[float]] = defaultdict(list)
        for number in range(_MOST_PAIRS):
            costs = sum(self._round_cost(everyone, test) for test in self._tests.values())
            if self._passed + costs > self._seconds * _ALL:
                break
            self._on_step(TuneProgress("what was found beside the default", self._passed))
            for goal, test in self._tests.items():
                for settings in everyone if number % 2 == 0 else everyone[::-1]:
                    rates[settings, goal].append(self._measure(settings, test))
        if len(rates[self._default, DECODE]) < _FEWEST_ROUNDS:
            self._measure_default()
            for each in candidates:
                self._say(Trial(", ".join(each.changes(self._default)), PREFILL, "no time"))
            return []
        return [self._compared(each, rates) for each in candidates]

    def _final_tests(self, candidates: Sequence[EngineSettings]) -> dict[str, BenchTest]:
        """Behind many tokens if attention changes, a whole batch if the micro-batch does."""
        prefill, decode = self._tests[PREFILL], self._tests[DECODE]
        default = self._default
        if any(
            (each.flash_attention, each.kv_type) != (default.flash_attention, default.kv_type) for each in candidates
        ):
            decode = replace(decode, n_depth=self._depth)
        if any(each.n_ubatch != default.n_ubatch for each in candidates):
            prefill = replace(prefill, n_prompt=_BATCH)
        return {PREFILL: prefill, DECODE: decode}

    def _compared(
        self, settings: EngineSettings, rates: Mapping[tuple[EngineSettings, str], list[float]]
    ) -> Improvement:
        verdicts = {
            goal: compare(rates[self._default, goal], rates[settings, goal], paired=True) for goal in self._tests
        }
        profile = self._profile(settings, {goal: _believed(verdict) for goal, verdict in verdicts.items()})
        return Improvement(profile, verdicts[PREFILL], verdicts[DECODE])

    def _affordable(self) -> list[EngineSettings]:
        """The candidates; where the time is too short to compare them, without what takes long to compare."""
        default = self._default
        short = {"n_ubatch": default.n_ubatch}
        shorter = {**short, "flash_attention": default.flash_attention, "kv_type": default.kv_type}
        found: list[EngineSettings] = []
        for dropped in ({}, short, shorter):
            found = self._candidates({goal: replace(best, **dropped) for goal, best in self._best.items()})
            if self._passed + self._final_cost(found) <= self._seconds * _ALL:
                break
        return found

    def _measure_default(self) -> None:
        """Nothing was better: figures of the default, where the races have not made them."""
        for test in self._tests.values():
            if not self._rates[self._default, test]:
                self._measure(self._default, test)

    def _profile(self, settings: EngineSettings, ratios: Mapping[str, float]) -> Profile:
        """Settings whose rates are so many times the default's."""
        default = {goal: statistics.median(self._rates[self._default, test]) for goal, test in self._tests.items()}
        seconds = self._machine.load_seconds(settings)
        return Profile(settings, seconds, default[PREFILL] * ratios[PREFILL], default[DECODE] * ratios[DECODE])


def _believed(verdict: Verdict) -> float:
    """The ratio to count on: nothing is gained where that is not sure."""
    if verdict.is_different:
        return verdict.ratio
    return 1.0 if verdict.kind == "same" else min(verdict.ratio, 1.0)


def _verdict(ratio: Ratio) -> str:
    if ratio.is_probably_faster:
        return "faster"
    if ratio.is_slower:
        return "slower"
    return "no difference" if ratio.high < _MATTERS + 0.01 else "unclear"


def _repetitions(test: BenchTest) -> int:
    return 2 if test.n_gen else 1


def _step_down(value: float, step: int, low: int, high: int) -> int:
    """The largest multiple of a step that is at most value, within bounds."""
    return min(max(int(value / step) * step, low), high)

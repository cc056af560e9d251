"""Machines that exist as formulas: how fast they compute with any settings is known, and a clock passes as they do.

Each setting has an effect of its own, drawn at random, and some have one together; measurements scatter, and now and
then another program takes the processor away.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from llmrun.errors import EngineCrashedError, LlmrunError
from llmrun.lab.bench.tune import PREFILL, Axis
from llmrun.planning.tuned import SPINS, TunableSettings
from llmrun.protocol.jobs.bench import BenchTest


class SimulatedMachine:
    """A tune.TuneBackend of formulas.

    Args:
        seed: of everything that is drawn.
        cores: physical ones.
        noise: standard deviation of a measurement's logarithm.
        bursts: how likely another program disturbs a measurement.
    """

    def __init__(self, seed: int, cores: int = 2, noise: float = 0.02, bursts: float = 0.05) -> None:
        self._random = draw = random.Random(seed)
        self.cores, self.noise, self.bursts = cores, noise, bursts
        self.now = 0.0
        self.measured = 0
        self.busy = False
        self.crashes_with: TunableSettings | None = None
        self.error: LlmrunError = EngineCrashedError("the engine died")
        self._prefill = draw.uniform(60, 900)  # tokens/s of one core
        self._decode = self._prefill * draw.uniform(0.1, 0.3)
        self._saturation = draw.uniform(0.4, 1.0) * cores  # threads that use the memory's bandwidth up
        self._load = draw.uniform(0.1, 1.5)
        self._attention = draw.uniform(-3e-4, 3e-4)  # what flash attention adds for each token of depth, relative
        self._effects = {
            name: (draw.gauss(0, size), draw.gauss(0, size))
            for name, size in (("repack", 0.3), ("mmap", 0.01), ("huge_pages", 0.03), ("spins", 0.01), ("kv", 0.05))
        }
        self._small_batch = draw.gauss(-0.05, 0.05)
        self._repacked_batch = draw.gauss(0, 0.03)
        self._loaded: set[object] = set()
        self._filled: set[object] = set()

    def true_rate(self, settings: TunableSettings, test: BenchTest) -> float:
        """Tokens/s without scatter."""
        index = 0 if test.n_prompt else 1
        log = 0.0
        for name, changed in (
            ("repack", not settings.repack),
            ("mmap", not settings.mmap),
            ("huge_pages", settings.huge_pages),
            ("spins", settings.spins != SPINS),
            ("kv", settings.kv_type_v != "f16"),
        ):
            log += self._effects[name][index] * changed * (name != "spins" or index)
        if settings.flash_attention != "off":
            log -= math.log1p(max(self._attention * test.n_depth, -0.5)) * (0.3 if index == 0 else 1)
        if test.n_prompt:
            halvings = math.log2(512 / settings.n_ubatch)
            log += halvings * (self._small_batch + self._repacked_batch * settings.repack) * (test.n_prompt / 512)
            return self._prefill * self._speedup(settings.threads_batch) * math.exp(log)
        return self._decode * min(self._speedup(settings.threads), self._saturation) * math.exp(log)

    def _speedup(self, threads: int) -> float:
        """More threads than cores slow each other down."""
        over = max(0, threads - self.cores)
        return min(threads, self.cores) ** 0.95 * 0.9**over

    def rates(self, settings: TunableSettings, test: BenchTest, repetitions: int) -> tuple[float, ...]:
        """Measured, with scatter."""
        if self.crashes_with == settings:
            raise self.error
        loads, fills = self.pending(settings, test.n_depth)
        self.now += loads * self._load
        self.now += fills * test.n_depth / self.true_rate(settings, BenchTest(n_prompt=512)) + 0.02
        self._loaded.add(_weights(settings))
        self._filled.add((_weights(settings), test.n_depth))
        found = []
        for _ in range(repetitions):
            rate = self.true_rate(settings, test) * math.exp(self._random.gauss(0, self.noise))
            if self._random.random() < self.bursts:
                rate *= self._random.uniform(0.3, 0.95)
            self.now += test.n_tokens / rate
            found.append(rate)
        self.measured += 1
        return tuple(found)

    def pending(self, settings: TunableSettings, depth: int) -> tuple[bool, bool]:
        """See TuneBackend."""
        weights = _weights(settings)
        return weights not in self._loaded, depth > 0 and (weights, depth) not in self._filled

    def load_seconds(self, settings: TunableSettings) -> float:
        """See TuneBackend."""
        return self._load * (1.0 if settings.repack else 0.3)

    def was_busy(self) -> bool:
        """See TuneBackend."""
        return self.busy

    def clock(self) -> float:
        """See TuneBackend."""
        return self.now


def _weights(settings: TunableSettings) -> object:
    """What an engine keeps between measurements depends on these."""
    return replace(settings, threads=1, threads_batch=1, n_ubatch=512)


def all_settings(default: TunableSettings, axes: Sequence[Axis]) -> Iterator[TunableSettings]:
    """Every combination of the axes' values: what an exhaustive sweep measures."""
    for changes in itertools.product(*(((), *axis.changes) for axis in axes)):
        yield replace(default, **{name: value for change in changes for name, value in change})


def best_rate(machine: SimulatedMachine, default: TunableSettings, axes: Sequence[Axis], goal: str) -> float:
    """What the fastest combination gives."""
    test = BenchTest(n_prompt=512) if goal == PREFILL else BenchTest(n_gen=16)
    return max(machine.true_rate(settings, test) for settings in all_settings(default, axes))

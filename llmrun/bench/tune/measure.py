"""Measures settings with real engines: one for each way of loading, kept as long as memory allows.

Owns the engine processes of a search; must not know what is searched for. Two ways of loading are compared in turns, so
both models have to stay in memory; a context is made anew for each measurement, which takes milliseconds.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType

from llmrun.bench.noise import DisturbanceMonitor
from llmrun.planning.settings import EngineSettings
from llmrun.protocol.jobs.bench import BENCH, Bench, BenchTest
from llmrun.protocol.loading import Load
from llmrun.runner.launch import launch
from llmrun.runner.runner import Runner

_MOST_ENGINES = 4


@dataclass(slots=True)
class _Engine:
    """A process with a loaded model, and how many tokens the KV state holds that it keeps."""

    runner: Runner
    depth: int = 0
    is_warm: bool = False


@dataclass(slots=True)
class EngineBackend:
    """See search.TuneBackend. Close it, or use it as a context manager.

    Attributes:
        load: how the model is loaded, but for what is measured.
        room: bytes of memory that engines may take together.
        each: bytes that one of them takes at most.
        clock: monotonic, in seconds.
    """

    load: Load
    room: int
    each: int
    clock: Callable[[], float] = time.monotonic
    _engines: OrderedDict[EngineSettings, _Engine] = field(default_factory=OrderedDict)
    _seconds: dict[EngineSettings, float] = field(default_factory=dict)
    _watch: DisturbanceMonitor = field(default_factory=lambda: DisturbanceMonitor().__enter__())

    def rates(self, settings: EngineSettings, test: BenchTest, repetitions: int) -> tuple[float, ...]:
        """Tokens/s of each repetition.

        Raises:
            LlmrunError: the model can't be loaded, or computed with, like this.
        """
        engine, key = self._engine(settings), _kept_apart(settings)
        load = settings.applied(self.load)
        try:
            if not engine.is_warm:  # one token touches all weights, so that their pages are there when a clock runs
                engine.runner.do(BENCH, Bench(load, BenchTest(n_gen=1), 1, warm_up=False))
                engine.is_warm = True
            done = engine.runner.do(BENCH, Bench(load, test, repetitions, warm_up=not test.n_prompt))
        except BaseException:
            self._drop(key)
            raise
        if test.n_depth:
            engine.depth = test.n_depth
        self._seconds[key] = min(done.load_ns / 1e9, self._seconds.get(key, math.inf))
        return tuple(1e9 * test.n_tokens / each.ns for each in done.repetitions)

    def pending(self, settings: EngineSettings, depth: int) -> tuple[bool, bool]:
        """See search.TuneBackend."""
        engine = self._engines.get(_kept_apart(settings))
        return engine is None, depth > 0 and (engine is None or engine.depth != depth)

    def load_seconds(self, settings: EngineSettings) -> float:
        """See search.TuneBackend."""
        return self._seconds[_kept_apart(settings)]

    def was_busy(self) -> bool:
        """See search.TuneBackend."""
        watch, self._watch = self._watch, DisturbanceMonitor().__enter__()
        watch.__exit__(None, None, None)
        return bool(watch.warnings)

    def _engine(self, settings: EngineSettings) -> _Engine:
        key = _kept_apart(settings)
        if key not in self._engines:
            most = max(1, min(_MOST_ENGINES, self.room // max(self.each, 1)))
            while len(self._engines) >= most:
                self._drop(next(iter(self._engines)))
            self._engines[key] = _Engine(Runner(launch(environment=settings.environment)))
        self._engines.move_to_end(key)
        return self._engines[key]

    def _drop(self, key: EngineSettings) -> None:
        engine = self._engines.pop(key, None)
        if engine is not None:
            engine.runner.close()

    def close(self) -> None:
        """End all engines."""
        for key in list(self._engines):
            self._drop(key)

    def __enter__(self) -> EngineBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _kept_apart(settings: EngineSettings) -> EngineSettings:
    """Settings that need an engine of their own: what loading depends on, and in which form it keeps a KV state."""
    return replace(settings, threads=0, threads_batch=0, n_ubatch=0)

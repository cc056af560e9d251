"""Tuning one model: from a file to an entry of tune.json.

Owns the engines of a search and what is remembered; must not know terminals.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from llmrun.bench.engines import EnginePool
from llmrun.bench.noise import DisturbanceMonitor
from llmrun.bench.tune.axes import axes_for
from llmrun.bench.tune.search import SearchResult, Step, search
from llmrun.errors import require_within
from llmrun.gguf.header import Header
from llmrun.model.load_plan import A_CHAT, prepare
from llmrun.models.registry import ModelSpec
from llmrun.planning.hardware import Hardware
from llmrun.planning.plan import CONTEXT_BOUNDS, Plan, margin
from llmrun.planning.settings import TunableSettings
from llmrun.planning.tuned import TunedSettings, remember, remembered
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.bench import BENCH, Bench, BenchTest
from llmrun.protocol.jobs.build import BUILD
from llmrun.protocol.llama_folder import has_variants
from llmrun.protocol.loading import Load
from llmrun.protocol.speculation import StepTime
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch

SECONDS_BOUNDS = (10.0, 3600.0)
_MOST_ENGINES = 4
_PROCESS_BYTES = 400 << 20  # of an engine besides its weights: KV cache, scratch memory, Python


class EngineBackend:
    """A search.TuneBackend of real engines: one for each way of loading, so that two of them can take turns.

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
        return tuple(1e9 * test.n_tokens / each.ns for each in done.repetitions)

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
    check_preferences(seconds, depth, plan.n_ctx)
    load = plan.load(header.path)
    default = TunableSettings.of(load)
    machine = EngineBackend(load, count_engines(header, hardware, plan))
    with closing(machine), DisturbanceMonitor() as watch:
        n_gpus = len(plan.gpu_bytes)
        variants = _cpu_variants()
        axes = axes_for(header, hardware, default, kv=kv, n_batch=load.n_batch, n_gpus=n_gpus, cpu_variants=variants)
        found = search(machine, default, axes, seconds=seconds, depth=depth, on_step=on_step)
    return replace(found, warnings=watch.warnings)


def _cpu_variants() -> tuple[str, ...]:
    """Return the variants to compare, the one in use first; none where there is one, or LLMRUN_CPU has chosen."""
    if "LLMRUN_CPU" in os.environ or not has_variants():
        return ()
    with closing(EngineClient()) as engine:
        build = engine.do(BUILD, Empty())
    return build.cpu_variant, *(name for name in build.cpu_variants if name != build.cpu_variant)


def measure_steps(spec: ModelSpec, path: Path, seconds: float | None = None) -> tuple[StepTime, ...]:
    """Measure and remember the decode step times that speculation needs, with the model loaded as for `llmrun chat`.

    Return () where drafts can't pay at any step time, and where `seconds` are over: chats measure them while idle.

    Raises:
        LlmrunError: the model can't be loaded, or the folder can't be written.
    """
    with prepare(spec, path, expected=A_CHAT) as model:
        if not model.drafting.can_pay:
            return ()
        began = time.monotonic()
        model.start(model.new_engine())
        return model.measure_steps(None if seconds is None else seconds - (time.monotonic() - began))


def check_preferences(seconds: float, depth: int | None, n_ctx: int = CONTEXT_BOUNDS[1]) -> None:
    """Check the preferences of tune().

    Args:
        n_ctx: the model's context window, where it is known.

    Raises:
        UsageError: one is out of bounds.
    """
    require_within("--seconds", seconds, SECONDS_BOUNDS)
    require_within("--depth", depth, (0, n_ctx // 2))


def keep(found: SearchResult, header: Header, hardware: Hardware, folder: Path, name: str = "") -> TunedSettings:
    """Remember the tuned settings, and return what is remembered now.

    A noisy search that found nothing does not replace settings known from before.

    Args:
        name: the model's, for display.

    Raises:
        LlmrunError: the folder can't be written.
    """
    tuned, known = found.tuned, remembered(header, hardware, folder)
    if found.warnings and not tuned.others and known is not None and known.others:
        return known
    remember(tuned, header, hardware, folder, name)
    return tuned

"""Tune one model: what to try, on what engines, and keeping what was found.

Owns the way from a file to an entry of tune.json; must not know terminals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmrun.bench.noise import DisturbanceMonitor
from llmrun.bench.results import BenchWarning
from llmrun.bench.tune.axes import axes_for
from llmrun.bench.tune.measure import EngineBackend
from llmrun.bench.tune.search import SearchResult, Step, search
from llmrun.errors import require_within
from llmrun.gguf.header import Header
from llmrun.model.load_plan import A_CHAT, prepare
from llmrun.models.registry import ModelSpec
from llmrun.planning.hardware import Hardware
from llmrun.planning.plan import CONTEXT_BOUNDS, Plan, margin
from llmrun.planning.settings import EngineSettings
from llmrun.planning.tuned import TunedSettings, remember, remembered
from llmrun.protocol.speculation import StepTime

SECONDS_BOUNDS = (10.0, 3600.0)
_PROCESS_BYTES = 400 << 20  # of an engine besides its weights: KV cache, scratch memory, Python


@dataclass(frozen=True, slots=True)
class TuneOutcome:
    """What was found, and what disturbed meanwhile."""

    found: SearchResult
    warnings: tuple[BenchWarning, ...]


def tune(
    header: Header,
    hardware: Hardware,
    plan: Plan,
    *,
    seconds: float,
    depth: int | None = None,
    kv: bool = False,
    on_step: Callable[[Step], None] = lambda step: None,
) -> TuneOutcome:
    """Search for faster settings than the plan's. Nothing is remembered yet.

    Args:
        plan: of the defaults.
        seconds: that it may take.
        depth: tokens in the context while decode is measured; None is what the time allows.
        kv: try a quantized KV cache too, which loses precision.

    Raises:
        UsageError: seconds or depth are out of bounds, or the time is too short for this model.
        LlmrunError: the model can't be loaded.
    """
    check_preferences(seconds, depth, plan.n_ctx)
    load = plan.load(header.path)
    default = EngineSettings.of(load)
    axes = axes_for(header, hardware, default, kv=kv)
    room = hardware.memory_available - margin(hardware.memory_available)
    with EngineBackend(load, room, header.weight_bytes + _PROCESS_BYTES) as machine, DisturbanceMonitor() as watch:
        found = search(machine, default, axes, seconds=seconds, depth=depth, on_step=on_step)
    return TuneOutcome(found, watch.warnings)


def measure_steps(spec: ModelSpec, path: Path) -> tuple[StepTime, ...]:
    """How long decode steps take as `llmrun chat` loads the model now, which speculation needs; it is remembered.

    () where drafts can't pay, however long they take.

    Raises:
        LlmrunError: the model can't be loaded, or the folder can't be written.
    """
    with prepare(spec, path, expected=A_CHAT) as model:
        if not model.drafting.can_pay:
            return ()
        model.start(model.new_engine())
        return model.measure_steps()


def check_preferences(seconds: float, depth: int | None, n_ctx: int = CONTEXT_BOUNDS[1]) -> None:
    """What can be refused before there is a model. Arguments as tune()'s.

    Args:
        n_ctx: the model's context window.

    Raises:
        UsageError: one is out of bounds.
    """
    require_within("--seconds", seconds, SECONDS_BOUNDS)
    require_within("--depth", depth, (0, n_ctx // 2))


def keep(outcome: TuneOutcome, header: Header, hardware: Hardware, folder: Path, name: str = "") -> TunedSettings:
    """Remember what was found, unless it is nothing, found in noise, and more was known; gives what is remembered now.

    Args:
        name: of the model, for people.

    Raises:
        LlmrunError: the folder can't be written.
    """
    tuned, known = outcome.found.tuned, remembered(header, hardware, folder)
    if outcome.warnings and not tuned.others and known is not None and known.others:
        return known
    remember(tuned, header, hardware, folder, name)
    return tuned

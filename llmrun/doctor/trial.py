"""Short trial answer: a model loads, and its speed.

Owns the choice of model and the time limits; must not know the judgement of the result (doctor.py).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from llmrun.config import Settings
from llmrun.errors import LlmrunError
from llmrun.model import Model
from llmrun.model.loading import prepare
from llmrun.models.location import locate
from llmrun.models.registry import ModelSpec, load_catalogue
from llmrun.models.store.store import Store
from llmrun.planning.hardware import probe
from llmrun.planning.memory import repacked_types
from llmrun.planning.plan import LoadPreferences
from llmrun.planning.predict import predict, work_of
from llmrun.planning.speed import remembered
from llmrun.protocol.messages import AnswerRequest, Finished, Message, Stats, TextDelta
from llmrun.protocol.params import SamplingParams
from llmrun.runner import client

ANSWER_SECONDS = 5.0
"""For the answer; loading comes on top."""
_LOAD_SECONDS = 30.0
_SHADER_SECONDS = 150.0  # to load on a GPU, whose driver may compile shaders the first time
_CONTEXT = 512
_PROMPT = "Write the numbers from 1 to 1000 in words, one a line."


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of a trial answer."""

    name: str  # of the model
    description: str  # architecture, parameters and quant
    devices: tuple[str, ...]  # ggml's
    load_seconds: float  # for weights and context
    tokens: int  # generated
    decode_rate: float  # tokens/s
    predicted_rate: float = 0.0  # tokens/s by this processor's measured speed; 0 when not measured, or on a GPU


def try_model(settings: Settings) -> TrialResult | None:
    """Run the default model, else the smallest installed one; None when there is no model on this disk.

    Raises LlmrunError if it can't be loaded, or the engine died or hung.
    """
    spec = _choose(settings)
    if spec is None or spec.path is None:
        return None
    with prepare(spec, spec.path, LoadPreferences(n_ctx=_CONTEXT)) as model:
        seconds = (_SHADER_SECONDS if model.plan.vram_bytes else _LOAD_SECONDS) + 2 * ANSWER_SECONDS
        watchdog = threading.Timer(seconds, model.close)
        watchdog.daemon = True
        watchdog.start()
        began = time.monotonic()
        try:
            model.start(client.EngineClient())
            stats = _answer(model)
        except LlmrunError as error:
            if time.monotonic() - began < seconds:
                raise
            why = "the machine is busy, or the GPU's driver hangs" if model.plan.vram_bytes else "the machine is busy"
            raise LlmrunError(f"there is no answer after {seconds:.0f} seconds", why=why) from error
        finally:
            watchdog.cancel()
        return TrialResult(
            spec.name,
            f"{model.header.architecture} {model.header.readable_parameters} {model.header.quant}",
            tuple(model.loaded.devices),
            model.loaded.load_seconds,
            stats.completion_tokens,
            stats.decode_rate,
            _predicted(model, stats, settings),
        )


def _choose(settings: Settings) -> ModelSpec | None:
    located = locate(load_catalogue().default, settings)
    if located.path is not None:
        return ModelSpec(located.spec.name, path=located.path)
    smallest = min(Store(settings).installed(), key=lambda model: model.size, default=None)
    return ModelSpec(smallest.name, path=smallest.path) if smallest else None


def _answer(model: Model) -> Stats:
    """Answer greedily until the context is full or time is up."""
    began = time.monotonic()
    stats = Stats()
    request = AnswerRequest(sampling=SamplingParams(temperature=0))
    if model.loaded.has_template:
        request = replace(request, messages=(Message("user", _PROMPT),))
    else:
        request = replace(request, prompt=_PROMPT)
    for event in model.answer(request):
        if isinstance(event, TextDelta) and time.monotonic() - began > ANSWER_SECONDS:
            model.cancel()
        if isinstance(event, Finished):
            stats = event.stats
    return stats


def _predicted(model: Model, stats: Stats, settings: Settings) -> float:
    hardware = probe()
    speed = remembered(hardware, settings.state_dir)
    if speed is None or model.plan.vram_bytes:
        return 0.0
    work = work_of(model.header)
    copies = work.copies(repacked_types(hardware.cpu_flags))
    return predict(work, speed, depth=stats.context_used // 2, copies=copies).decode_rate

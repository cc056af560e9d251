"""An explained answer: the engine's activations, the sampler's choices, the KV cache, the machine's limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from llmrun.errors import LlmrunError
from llmrun.gguf.header import Header
from llmrun.lab.bench.limits import limit_of, phases
from llmrun.lab.bench.results import Limit
from llmrun.model import Model
from llmrun.planning.hardware import this_machine
from llmrun.planning.predict import work_of
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.jobs.explain import EXPLAIN, ExplainRun, RunCollected
from llmrun.protocol.jobs.machine import LIMITS, MeasureLimits
from llmrun.protocol.questions import EXPLAIN_CHOICES, MOST_CHOICES, Choice, ExplainChoices

_Command = TypeVar("_Command")
_Result = TypeVar("_Result")
CANDIDATES = 5
PAGE_CANDIDATES = 200
"""Candidates of each choice for a page, which computes the effect of other sampler settings from them."""
_MEASURED_SECONDS = 0.05  # for reading, and for each kind of multiplying


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The memory use of a KV cache."""

    bytes_per_token: float  # of all layers together
    layers: int  # with keys and values
    unshared_bytes_per_token: float  # if each head had keys and values of its own (no GQA); 0 if unknown
    window: int  # tokens of the sliding window; 0 without one
    window_layers: int  # with a sliding window
    n_ctx: int
    full_bytes: float  # of a full context window


@dataclass(frozen=True, slots=True)
class ExplainedAnswer:
    """The explanation of one answer."""

    model: str  # name
    run: RunCollected
    choices: tuple[Choice, ...]  # of the answer's tokens, in order; only the last ones of a long answer
    cache: CacheUse
    prefill_limit: Limit | None  # of the machine, for the watched part of the prompt; None if unknown
    decode_limit: Limit | None  # the same for a single token


class JobRunner(Protocol):
    """An engine that runs jobs, see runner.client.EngineClient and server.connection.EngineConnection."""

    def do(self, kind: JobKind[_Command, Any, _Result], command: _Command, /) -> _Result:
        """Run a job of the loaded model, and return its result."""


def explain_answer(
    model: Model,
    measuring: tuple[JobRunner, int] | None = None,
    *,
    everywhere: bool = False,
    candidates: int = CANDIDATES,
) -> ExplainedAnswer:
    """Return the explanation of a model's last answer, whose request must have had `remember` set.

    Args:
        measuring: an engine with the model, and the number of the answer's request; by default the model's own.
        everywhere: see llmrun.protocol.jobs.explain.ExplainRun.

    Raises:
        UsageError: there is no such answer.
        OutOfMemoryError: a second context does not fit.
    """
    engine, answer = measuring or model.last_answer()
    choices = engine.do(EXPLAIN_CHOICES, ExplainChoices(answer, MOST_CHOICES, candidates)).choices
    run = engine.do(EXPLAIN, ExplainRun(answer, everywhere))
    watched = BenchTest(n_prompt=len(run.tokens) - run.first, n_depth=run.first)
    prefill, decode = machine_limits(model, engine, watched, BenchTest(n_gen=1, n_depth=len(run.tokens) - 1))
    name = model.path.stem if model.spec.path else model.spec.name
    return ExplainedAnswer(name, run, choices, cache_use(model), prefill, decode)


def cache_use(model: Model) -> CacheUse:
    """Return the KV cache's memory use, from the model's header and load parameters."""
    header, element = model.header, model.load.kv_element_bytes
    per_token = header.kv_bytes_per_token(element)
    return CacheUse(
        bytes_per_token=per_token,
        layers=len(header.kv_layers),
        unshared_bytes_per_token=per_token * _heads_per_kv_head(header),
        window=header.sliding_window if header.n_window_layers else 0,
        window_layers=header.n_window_layers,
        n_ctx=model.loaded.n_ctx,
        full_bytes=header.cache_bytes(model.loaded.n_ctx, element, ubatch=model.load.n_ubatch),
    )


def _heads_per_kv_head(header: Header) -> float:
    """Return the number of heads that share keys and values; 0 for latent attention."""
    if header.is_latent or not isinstance(header.n_kv_heads, int) or not isinstance(header.n_heads, int):
        return 0.0
    return header.n_heads / header.n_kv_heads if header.n_kv_heads else 0.0


def machine_limits(model: Model, engine: JobRunner, *tests: BenchTest) -> tuple[Limit | None, ...]:
    """Measure this machine, and return its limit in each test; None with a GPU."""
    unknown = (None,) * len(tests)
    if model.load.gpu_layers and this_machine().gpus:
        return unknown
    batch = max(1, *(test.n_prompt for test in tests))
    settings = replace(model.load, n_batch=batch, n_ubatch=batch)
    work = work_of(model.header)
    phases_of_tests = [phases(work, test, settings) for test in tests]
    n_bytes = int(max(phase.working_set for test_phases in phases_of_tests for phase in test_phases))
    try:
        machine = engine.do(LIMITS, MeasureLimits(min(n_bytes, 1 << 30), model.load.threads, _MEASURED_SECONDS))
    except LlmrunError:
        return unknown
    return tuple(limit_of(test_phases, machine) for test_phases in phases_of_tests)

"""An answer explained: what the engine saw of it, how its tokens were chosen, and what that means on this machine.

Owns how these are put together; must not print.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.bench.limits import TokenCost, limit_of
from llmrun.bench.parameters import BenchSettings
from llmrun.bench.results import Limit
from llmrun.errors import LlmrunError
from llmrun.gguf.header import Header
from llmrun.model import Model
from llmrun.planning.machine import this_machine
from llmrun.planning.memory import KV_BYTES
from llmrun.protocol.finished_answers import Choice
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.jobs.explain import EXPLAIN, ExplainRun, RunCollected
from llmrun.protocol.jobs.limits import LIMITS, MeasureLimits

MOST_TOKENS = 64
"""Of an answer whose choices can be explained; the logits of each are kept."""
CANDIDATES = 5
PAGE_CANDIDATES = 200
"""Of each choice, from which a page computes what other settings would have made of it."""
_MEASURED_SECONDS = 0.05  # for reading, and for each kind of multiplying


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the KV cache takes.

    Attributes:
        bytes_per_token: in all layers together.
        layers: that keep keys and values.
        unshared_bytes_per_token: what it would be if each head had keys and values of its own; 0 where that is unknown.
        window: how many tokens the layers with a sliding window look back; 0 where there are none.
        window_layers: of those.
        n_ctx: the context window.
        full_bytes: of a full context window.
    """

    bytes_per_token: float
    layers: int
    unshared_bytes_per_token: float
    window: int
    window_layers: int
    n_ctx: int
    full_bytes: float


@dataclass(frozen=True, slots=True)
class ExplainedAnswer:
    """Everything about one answer.

    Attributes:
        model: its name.
        run: what the engine saw.
        choices: how the answer's tokens were chosen, in order; only the last of a long one.
        cache: what the KV cache takes.
        prefill_limit: how fast the machine could read the watched part of the prompt at most; None where unknown.
        decode_limit: the same of a single token.
    """

    model: str
    run: RunCollected
    choices: tuple[Choice, ...]
    cache: CacheUse
    prefill_limit: Limit | None
    decode_limit: Limit | None


def explain_answer(model: Model, *, everywhere: bool = False, candidates: int = CANDIDATES) -> ExplainedAnswer:
    """Explain the answer that a model gave last; it has to have been told to remember its choices.

    Args:
        everywhere: see llmrun.protocol.jobs.explain.ExplainRun.
        candidates: how many of the likeliest to name for each choice.

    Raises:
        UsageError: there is no such answer.
        OutOfMemoryError: a second context does not fit.
    """
    engine, answer = model.last_answer()
    choices = model.explain(MOST_TOKENS, candidates).choices
    run = engine.do(EXPLAIN, ExplainRun(answer, everywhere))
    prefill, decode = _limits(model, run)
    name = model.path.stem if model.spec.path else model.spec.name
    return ExplainedAnswer(name, run, choices, cache_use(model), prefill, decode)


def cache_use(model: Model) -> CacheUse:
    """By the model's header, and how it is loaded."""
    header, element = model.header, _element_bytes(model)
    per_token = header.kv_bytes_per_token(element)
    return CacheUse(
        bytes_per_token=per_token,
        layers=len(header.kv_layers),
        unshared_bytes_per_token=per_token * _heads_per_kv_head(header),
        window=header.sliding_window if header.n_window_layers else 0,
        window_layers=header.n_window_layers,
        n_ctx=model.loaded.n_ctx,
        full_bytes=header.kv_bytes(model.loaded.n_ctx, element, batch=model.load.n_ubatch),
    )


def _heads_per_kv_head(header: Header) -> float:
    """How many heads share keys and values; 0 where what is kept is no head's."""
    if header.is_latent or not isinstance(header.n_kv_heads, int) or not isinstance(header.n_heads, int):
        return 0.0
    return header.n_heads / header.n_kv_heads if header.n_kv_heads else 0.0


def _element_bytes(model: Model) -> float:
    return (KV_BYTES.get(model.load.kv_type_k, 2.0) + KV_BYTES.get(model.load.kv_type_v, 2.0)) / 2


def _limits(model: Model, run: RunCollected) -> tuple[Limit | None, Limit | None]:
    """What this machine could do at most, of the watched prefill and of a decode step; unknown with a GPU."""
    if model.load.gpu_layers and this_machine().gpus:
        return None, None
    watched = len(run.tokens) - run.first
    settings = BenchSettings(model.load.threads, n_batch=watched, n_ubatch=watched)
    needs, engine = TokenCost.of(model.header), model.last_answer()[0]
    tests = (BenchTest(n_prompt=watched, n_depth=run.first), BenchTest(n_gen=1, n_depth=len(run.tokens) - 1))
    phases = [needs.phases(test, settings, _element_bytes(model)) for test in tests]
    n_bytes = int(max(phase.working_set for found in phases for phase in found))
    try:
        machine = engine.do(LIMITS, MeasureLimits(min(n_bytes, 1 << 30), model.load.threads, _MEASURED_SECONDS))
    except LlmrunError:
        return None, None
    prefill, decode = (limit_of(found, machine) for found in phases)
    return prefill, decode

"""From a model's file to a model that can be started: its header, the plan, and what it is loaded for.

Owns the order of that; must not know engines or terminals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.config import TUNE_FILE, Settings, load_settings
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.model import Model
from llmrun.models.registry import ModelSpec
from llmrun.planning.hardware import Hardware
from llmrun.planning.machine import this_machine
from llmrun.planning.pairs import DraftFile, Drafts, plan_pair
from llmrun.planning.plan import CONTEXT_BOUNDS, LoadPreferences, Plan, scores_fit
from llmrun.planning.speculation import AUTO, DraftPolicy

if TYPE_CHECKING:
    from llmrun.planning.settings import TunableSettings
    from llmrun.protocol.adapters import Adapter
    from llmrun.protocol.loading import Load


@dataclass(frozen=True, slots=True)
class ExpectedUse:
    """What a model is loaded for, as a guess: `llmrun tune` may have found other settings for other lengths.

    Attributes:
        prompt_tokens: that will be prefilled, all turns of a conversation together.
        answer_tokens: that will be decoded.
        own_engine: an engine may be started for it, which takes a tenth of a second longer.
    """

    prompt_tokens: int
    answer_tokens: int
    own_engine: bool = False


A_CHAT = ExpectedUse(prompt_tokens=2000, answer_tokens=2000, own_engine=True)
"""A conversation: its questions and files, and its answers."""


def prepare(
    spec: ModelSpec,
    path: Path,
    wishes: LoadPreferences | None = None,
    *,
    warm_up: bool = False,
    verbose: bool = False,
    keeps_states: bool = False,
    expected: ExpectedUse | None = None,
    speculate: int = AUTO,
    draft: DraftFile | None = None,
    promised: int = 0,
    adapters: tuple[Adapter, ...] = (),
    projector: Path | None = None,
) -> Model:
    """Read a model's header and make the plan; start() loads it.

    Args:
        keeps_states: KV states that were saved are looked for, and save_state() saves more.
        expected: what it is loaded for; settings of `llmrun tune` are only used where that is known.
        speculate: see DraftPolicy.most.
        draft: the model that drafts for it.
        promised: bytes of the free memory that other models may still come to take.
        projector: turns pictures into what the model takes.
        adapters: LoRA adapters that answers may be computed with.

    Raises:
        BadModelError: the file is damaged, or no model that llama.cpp can run.
        OutOfMemoryError: it does not fit.
        UsageError: the draft model or an adapter does not go with it.
        NetworkError: a worker can't be used.
    """
    header = read_header(path)
    check(header)
    wishes, settings = wishes or LoadPreferences(), load_settings()
    hardware = _beside(this_machine(wishes.workers), promised, projector)
    planned = partial(
        plan_pair, header, draft, hardware, name=spec.name, repository=spec.repository or "", adapters=adapters
    )
    plan, drafts = planned(wishes)
    keeps_states = keeps_states and settings.states_bytes > 0 and not wishes.workers  # it would cross the network
    load = replace(
        plan.load(path),
        warm_up=warm_up,
        verbose=verbose,
        states=str(settings.states_dir) if keeps_states else "",
        states_bytes=settings.states_bytes,
        projector=str(projector.absolute()) if projector is not None else "",
        adapters=adapters,
    )
    tuned = _tuned(header, hardware, settings, expected) if expected and not wishes.workers else None
    if tuned is not None:
        plain, load = load, tuned.applied_within(load, wishes, without_flash=scores_fit(header, hardware, plan.n_ctx))
        changes = tuned.of(load).changes(tuned.of(plain))
        plan = replace(plan, threads=load.threads, flash_attention=load.flash_attention, tuned=changes)
    if drafts is not None:
        load = replace(load, draft=replace(drafts.load, threads=load.threads, verbose=verbose))
    drafting = DraftPolicy(header, hardware, load, settings.state_dir, speculate, drafts and drafts.header)
    load_for = partial(_load_for, load, plan, wishes, planned)
    return Model(path, spec, header, plan, load, drafting, tuned, draft, load_for)


def _beside(hardware: Hardware, promised: int, projector: Path | None) -> Hardware:
    """Return a machine with the free memory that is left beside other models and a projector."""
    taken = promised + (projector.stat().st_size if projector is not None else 0)
    return replace(hardware, memory_available=max(hardware.memory_available - taken, 0))


def _load_for(
    load: Load,
    plan: Plan,
    wishes: LoadPreferences,
    planned: Callable[[LoadPreferences], tuple[Plan, Drafts | None]],
    answers: int,
) -> Load:
    """Return the load for that many answers decoded together, with the same weights and context window.

    Raises:
        OutOfMemoryError: there is no memory for them.
    """
    n_ctx, cpu_experts = max(load.n_ctx, CONTEXT_BOUNDS[0]), len(plan.cpu_experts)
    wishes = replace(wishes, n_ctx=n_ctx, gpu_layers=plan.gpu_layers, cpu_experts=cpu_experts, parallel=answers)
    wide, drafts = planned(wishes)
    return _with_sequences(load, wide.load(Path(load.path)), drafts.load if drafts is not None else None)


def _with_sequences(load: Load, wide: Load, draft: Load | None) -> Load:
    """Return a load with as many sequences as another one, and a KV cache for them; nothing else is changed."""
    if load.draft is not None and draft is not None:
        draft = _with_sequences(load.draft, draft, None)
    return replace(
        load,
        n_ctx_start=wide.n_ctx_start,
        n_seq_max=wide.n_seq_max,
        n_cells=wide.n_cells,
        n_parked=wide.n_parked,
        n_stream=wide.n_stream,
        draft=draft,
    )


def _tuned(header: Header, hardware: Hardware, settings: Settings, expected: ExpectedUse) -> TunableSettings | None:
    """What `llmrun tune` found to be the fastest for this, None where it was never asked."""
    if not (settings.state_dir / TUNE_FILE).exists():
        return None  # spares every start the imports
    from llmrun.planning.tuned import choose, remembered

    found = remembered(header, hardware, settings.state_dir)
    if found is None:
        return None
    own = expected.own_engine
    return choose(found, expected.prompt_tokens, expected.answer_tokens, own_environment=own)

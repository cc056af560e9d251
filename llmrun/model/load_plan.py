"""The plan for loading a model's file: header, preferences, tuned settings. Must not know engines or terminals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.config import TUNE_FILE, Settings, load_settings
from llmrun.errors import LlmrunError, OutOfMemoryError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.model import Model
from llmrun.models.registry import ModelSpec
from llmrun.planning.hardware import Hardware, this_machine
from llmrun.planning.measurements import known_excess, measured_attention
from llmrun.planning.memory import UBATCH
from llmrun.planning.pairs import DraftFile, Drafts, plan_pair
from llmrun.planning.plan import CONTEXT_BOUNDS, LoadPreferences, Measured, Plan, scores_fit
from llmrun.planning.speculation import AUTO, OFF, DraftPolicy

if TYPE_CHECKING:
    from llmrun.planning.tuned import TunableSettings
    from llmrun.protocol.adapters import Adapter
    from llmrun.protocol.loading import Load


@dataclass(frozen=True, slots=True)
class ExpectedUse:
    """A guess of a model's use: `llmrun tune` may have found different settings for different lengths."""

    prompt_tokens: int  # prefilled in all turns of a conversation
    answer_tokens: int  # decoded in all turns
    own_engine: bool = False  # an engine may be started for it, which takes a tenth of a second longer


A_CHAT = ExpectedUse(prompt_tokens=2000, answer_tokens=2000, own_engine=True)
"""A conversation: its questions and files, and its answers."""


def prepare(
    spec: ModelSpec,
    path: Path,
    preferences: LoadPreferences | None = None,
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
        expected: use; settings of `llmrun tune` need it.
        speculate: see DraftPolicy.most.
        promised: bytes of the free memory that other models may still come to take.
        projector, adapters: as in Load.

    Raises:
        BadModelError: the file is damaged, or no model that llama.cpp can run.
        OutOfMemoryError: it does not fit.
        UsageError: the draft model or an adapter does not go with it.
        NetworkError: a worker can't be used.
    """
    header = read_header(path)
    check(header)
    preferences, settings = preferences or LoadPreferences(), load_settings()
    hardware = _beside(this_machine(preferences.workers), promised, projector)
    measured = _measured(header, hardware, settings)
    if speculate != AUTO:
        preferences = replace(preferences, n_drafted=speculate)
    if draft is not None or speculate == OFF:
        preferences = replace(preferences, draft_heads=False)
    pair = partial(plan_pair, header, draft, hardware, measured=measured, adapters=adapters)
    planned = partial(pair, name=spec.name, repository=spec.repository or "")
    tuned = _tuned(header, hardware, settings, expected) if expected and not preferences.workers else None
    split_mode = preferences.split_mode
    preferences, tuned, plan, drafts = _divided(preferences, tuned, planned)
    keeps_states = keeps_states and settings.states_bytes > 0 and not preferences.workers  # it would cross the network
    load = replace(
        plan.load(path),
        warm_up=warm_up,
        verbose=verbose,
        states=str(settings.states_dir) if keeps_states else "",
        states_bytes=settings.states_bytes,
        projector=str(projector.absolute()) if projector is not None else "",
        adapters=adapters,
    )
    if tuned is not None:
        without_flash = scores_fit(header, hardware, plan.n_ctx, preferences.n_ubatch)
        plan, load = _with_tuned(plan, load, tuned, preferences, split_mode, without_flash=without_flash)
    if drafts is not None:
        load = replace(load, draft=replace(drafts.load, threads=load.threads, verbose=verbose))
    drafting = DraftPolicy(header, hardware, load, settings.state_dir, speculate, drafts and drafts.header)
    load_for = partial(_load_for, load, plan, preferences, planned)
    return Model(path, spec, header, plan, load, drafting, tuned, draft, load_for)


def _measured(header: Header, hardware: Hardware, settings: Settings) -> Measured:
    """Return what earlier runs of the model here measured."""
    known = header, hardware, settings.state_dir
    return Measured(measured_attention(*known), known_excess(*known))


def _divided(
    preferences: LoadPreferences,
    tuned: TunableSettings | None,
    planned: Callable[[LoadPreferences], tuple[Plan, Drafts | None]],
) -> tuple[LoadPreferences, TunableSettings | None, Plan, Drafts | None]:
    """Return a plan and its settings, with the tuned micro-batch and split mode if as much fits, also on GPUs."""
    if tuned is not None:
        preferences, tuned = _with_ubatch(preferences, tuned, planned)
    plan, drafts = planned(preferences)
    divided = tuned.preferred(preferences) if tuned else preferences
    if divided != preferences:
        with suppress(LlmrunError):  # it does not go with the preferences, or does not fit
            other, other_drafts = planned(divided)
            if (other.gpu_layers, other.n_ctx) == (plan.gpu_layers, plan.n_ctx):
                return divided, tuned, other, other_drafts
    return preferences, tuned, plan, drafts


def _beside(hardware: Hardware, promised: int, projector: Path | None) -> Hardware:
    """Return the machine with the free memory left beside other models and a projector."""
    taken = promised + (projector.stat().st_size if projector is not None else 0)
    return replace(hardware, memory_available=max(hardware.memory_available - taken, 0))


def _with_ubatch(
    preferences: LoadPreferences,
    tuned: TunableSettings,
    planned: Callable[[LoadPreferences], tuple[Plan, Drafts | None]],
) -> tuple[LoadPreferences, TunableSettings]:
    """Return both with the tuned micro-batch, or with the usual one if the tuned one leaves a smaller context."""
    if tuned.n_ubatch > UBATCH:
        wider = replace(preferences, n_ubatch=tuned.n_ubatch)
        try:
            if planned(wider)[0].n_ctx == planned(preferences)[0].n_ctx:
                return wider, tuned
        except OutOfMemoryError:
            pass
        tuned = replace(tuned, n_ubatch=UBATCH)
    return preferences, tuned


def _with_tuned(
    plan: Plan,
    load: Load,
    tuned: TunableSettings,
    preferences: LoadPreferences,
    split_mode: str,
    *,
    without_flash: bool,
) -> tuple[Plan, Load]:
    changed = tuned.applied_within(load, preferences, without_flash=without_flash)
    words = tuned.of(changed).changes(replace(tuned.of(load), split_mode=split_mode))
    plan = replace(plan, threads=changed.threads, flash_attention=changed.flash_attention, tuned=words)
    return plan, changed


def _load_for(
    load: Load,
    plan: Plan,
    preferences: LoadPreferences,
    planned: Callable[[LoadPreferences], tuple[Plan, Drafts | None]],
    answers: int,
) -> Load:
    """Return the load for this many answers decoded together, with the same weights and context window.

    Raises:
        OutOfMemoryError: there is no memory for them.
    """
    wider = replace(preferences, n_ctx=max(load.n_ctx, CONTEXT_BOUNDS[0]), parallel=answers)
    wide, drafts = planned(replace(wider, gpu_layers=plan.gpu_layers, cpu_experts=len(plan.cpu_experts)))
    return _with_sequences(load, wide.load(Path(load.path)), drafts.load if drafts is not None else None)


def _with_sequences(load: Load, wide: Load, draft: Load | None) -> Load:
    """Return a load with another one's number of sequences and their KV cache."""
    if load.draft is not None and draft is not None:
        draft = _with_sequences(load.draft, draft, None)
    return replace(
        load,
        n_ctx_start=wide.n_ctx_start,
        n_seq_max=wide.n_seq_max,
        n_cells=wide.n_cells,
        n_parked=wide.n_parked,
        checkpoint_bytes=wide.checkpoint_bytes,
        n_rollback=wide.n_rollback,
        draft=draft,
    )


def _tuned(header: Header, hardware: Hardware, settings: Settings, expected: ExpectedUse) -> TunableSettings | None:
    """Return the fastest settings found by `llmrun tune` for this use; None without a result."""
    if not (settings.state_dir / TUNE_FILE).exists():
        return None  # spares every start the imports
    from llmrun.planning.tuned import choose, remembered

    found = remembered(header, hardware, settings.state_dir)
    if found is None:
        return None
    own = expected.own_engine
    return choose(found, expected.prompt_tokens, expected.answer_tokens, own_environment=own)

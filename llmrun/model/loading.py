"""From a name to a model that answers: load() of the Python API, and prepare(), which makes the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmrun import errors
from llmrun.config import Settings, load_settings
from llmrun.errors import LlmrunError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.model import Model
from llmrun.models.location import locate, not_on_disk
from llmrun.models.modelfile import Modelfile
from llmrun.models.registry import ModelSpec
from llmrun.planning.hardware import Hardware, this_machine
from llmrun.planning.measurements import Comparisons, measured_before
from llmrun.planning.pairs import DraftFile, plan_pair
from llmrun.planning.plan import Plan, scores_fit
from llmrun.planning.preferences import CONTEXT_BOUNDS, LoadPreferences
from llmrun.planning.speculation import AUTO, OFF, DraftPolicy, read_draft_source, read_speculate
from llmrun.planning.tuned import TunableSettings, choose, remembered
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.arguments import checked
from llmrun.runner import client

if TYPE_CHECKING:
    from llmrun.protocol.loading import Load


@dataclass(frozen=True, slots=True)
class ExpectedUse:
    """A guess of a model's use: `llmrun tune` may have found different settings for different lengths."""

    prompt_tokens: int  # prefilled in all turns of a conversation
    answer_tokens: int  # decoded in all turns
    own_engine: bool = False  # an engine may be started for it, which takes a tenth of a second longer


A_CHAT = ExpectedUse(prompt_tokens=2000, answer_tokens=2000, own_engine=True)
"""A conversation: its questions and files, and its answers."""


@checked
def load(
    name: str | PathLike[str],
    *,
    n_ctx: int | None = None,
    threads: int | None = None,
    gpu_layers: int | None = None,
    parallel: int = 1,
    speculate: int | Literal["auto", "off"] = "auto",
    draft: str | PathLike[str] | None = None,
    lora: Sequence[str] = (),
    pull: bool = True,
    on_pull: Callable[[int, int], None] = lambda done, total: None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> Model:
    """Load a model by name or path; downloads a missing one first.

        model = llmrun.load("smollm2", n_ctx=4096)

    Args:
        name: an alias such as "smollm2", owner/repo[:quant], a URL, or a path.
        n_ctx: context window in tokens; None is the trained one, cut to the memory.
        threads: None is one for each physical core.
        gpu_layers: layers on the GPU; -1 is all, None as many as fit.
        parallel: number of answers decoded together, each in its own context window; a shared prompt is prefilled once:
            `await asyncio.gather(*(model.chat("Hi", seed=seed) for seed in range(4)))`.
        speculate: maximum drafted tokens per step, which never changes answers; "auto" is as many as are
            expected to pay.
        draft: name or path of a smaller draft model with the same vocabulary, downloaded if missing; "mtp" drafts with
            the model's own heads, as is the default where it has some, "off" only from the text.
        lora: LoRA adapters, each a file or "FILE:SCALE"; AnswerRequest.adapters chooses among them.
        pull: False never downloads.
        on_pull: called with (bytes done, bytes in all) during the download.
        on_progress: called with the loaded share of the weights, 0 to 1.

    Raises:
        LlmrunError: see llmrun.errors for the kinds.
    """
    from llmrun.models.adapters import read_adapters  # the command's start, too, imports this module

    draft, heads = read_draft_source(fspath(draft) if draft is not None else None)
    preferences = LoadPreferences(n_ctx=n_ctx, threads=threads, gpu_layers=gpu_layers, parallel=parallel, as_alone=True)
    preferences = replace(preferences, draft_heads=heads)
    max_drafted = read_speculate(speculate, "speculate")
    settings, adapters = load_settings(), read_adapters(lora, "lora")
    find = partial(_find, settings=settings, pull=pull, on_pull=on_pull)
    spec, path = find(fspath(name))
    drafts = DraftFile.of(*find(draft)) if draft is not None else None
    model = prepare(spec, path, preferences, speculate=max_drafted, draft=drafts, adapters=adapters)
    model.plan = replace(model.plan, notes=tuple(map(errors.rephrase, model.plan.notes)))
    model.start(client.EngineClient(), on_progress)
    return model


def _find(name: str, settings: Settings, *, pull: bool, on_pull: Callable[[int, int], None]) -> tuple[ModelSpec, Path]:
    """Return a model and its file; arguments and exceptions as of load()."""
    located = locate(name, settings)
    if located.path is not None:
        return located.spec, located.path
    if not pull:
        raise not_on_disk(name)
    from llmrun.models.pull import pull as fetch
    from llmrun.planning.estimate import choose_files

    return located.spec, fetch(located.spec, settings, on_pull, choose=choose_files)


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
    header, settings = _readable(path), load_settings()
    preferences, adapters = _with_stored(preferences or LoadPreferences(), adapters, spec.modelfile, header)
    hardware = _beside(this_machine(preferences.workers), promised, projector)
    measured = measured_before(header, hardware, settings.state_dir)
    preferences = preferences if speculate == AUTO else replace(preferences, n_drafted=speculate)
    preferences = replace(preferences, draft_heads=False) if draft is not None or speculate == OFF else preferences
    pair = partial(plan_pair, header, draft, hardware, measured=measured, adapters=adapters)
    planned = partial(pair, name=spec.name, repository=spec.repository or "")
    tuned = _tuned(header, hardware, settings, expected) if expected and not preferences.workers else None
    given, (preferences, plan) = preferences, first_that_fits(preferences, tuned, planned)
    if tuned is not None:
        tuned, plan = _with_tuned(plan, tuned, preferences, given, header, hardware)
    load = plan.load
    keeps_states = keeps_states and settings.states_bytes > 0 and not preferences.workers  # it would cross the network
    load = replace(
        load,
        path=str(path.absolute()),
        warm_up=warm_up,
        verbose=verbose,
        states=str(settings.states_dir) if keeps_states else "",
        states_bytes=settings.states_bytes,
        projector=str(projector.absolute()) if projector is not None else "",
        adapters=adapters,
        draft=load.draft and replace(load.draft, threads=load.threads, cpu_variant=load.cpu_variant, verbose=verbose),
    )
    plan = replace(plan, load=load, notes=(*plan.notes, *spec.modelfile.notes))
    drafting = DraftPolicy(header, load, speculate, plan.draft)
    comparisons = Comparisons(header, hardware, load, settings.state_dir)
    load_for = partial(_load_for, plan, preferences, planned)
    return Model(path, spec, header, plan, drafting, comparisons, tuned, draft, load_for)


def _readable(path: Path) -> Header:
    """Return the header of a model that llama.cpp can run; raise BadModelError for any other."""
    header = read_header(path)
    check(header)
    return header


def _with_stored(
    preferences: LoadPreferences, adapters: tuple[Adapter, ...], modelfile: Modelfile, header: Header
) -> tuple[LoadPreferences, tuple[Adapter, ...]]:
    """Return the user's preferences and adapters, completed from Ollama's store."""
    if preferences.n_ctx is None and modelfile.n_ctx is not None:
        preferences = replace(preferences, n_ctx=max(CONTEXT_BOUNDS[0], min(modelfile.n_ctx, header.n_ctx_train)))
    given = {adapter.path for adapter in adapters}
    missing = [path for path in map(str, modelfile.adapters) if path not in given]
    return preferences, (
        *adapters,
        *(Adapter(f"stored-{number}", path, is_stored=True) for number, path in enumerate(missing, 1)),
    )


def first_that_fits(
    preferences: LoadPreferences,
    tuned: TunableSettings | None,
    planned: Callable[[LoadPreferences], Plan],
) -> tuple[LoadPreferences, Plan]:
    """Return preferences with the tuned micro-batch and split mode, if as much fits with them, and their plan."""
    plan = planned(preferences)
    for tried in _candidates(preferences, tuned) if tuned is not None else ():
        with suppress(LlmrunError):  # it does not go with the preferences, or does not fit
            other = planned(tried)
            if (other.load.gpu_layers, other.load.n_ctx) == (plan.load.gpu_layers, plan.load.n_ctx):
                return tried, other
    return preferences, plan


def _candidates(preferences: LoadPreferences, tuned: TunableSettings) -> list[LoadPreferences]:
    """Return other preferences with tuned settings, the best first."""
    is_wide = preferences.n_ubatch is None and tuned.n_ubatch > preferences.micro_batch
    wide = replace(preferences, n_ubatch=tuned.n_ubatch) if is_wide else preferences
    tried = dict.fromkeys((tuned.preferred(wide), wide, tuned.preferred(preferences)))
    return [each for each in tried if each != preferences]


def _beside(hardware: Hardware, promised: int, projector: Path | None) -> Hardware:
    """Return the machine with the free memory left beside other models and a projector."""
    taken = promised + (projector.stat().st_size if projector is not None else 0)
    return replace(hardware, memory_available=max(hardware.memory_available - taken, 0))


def _with_tuned(
    plan: Plan,
    tuned: TunableSettings,
    preferences: LoadPreferences,
    given: LoadPreferences,
    header: Header,
    hardware: Hardware,
) -> tuple[TunableSettings, Plan]:
    """Return the tuned settings that are used, and the plan with them.

    Args:
        preferences: of the plan, which leave some settings open.
        given: the user's.
    """
    tuned = replace(tuned, n_ubatch=min(given.n_ubatch or tuned.n_ubatch, preferences.micro_batch))
    without_flash = scores_fit(header, hardware, plan.load.n_ctx, preferences.micro_batch)
    load = tuned.applied_within(plan.load, preferences, without_flash=without_flash)
    words = tuned.of(load).changes(replace(tuned.of(plan.load), split_mode=given.split_mode))
    return tuned, replace(plan, load=load, tuned=words)


def _load_for(
    plan: Plan, preferences: LoadPreferences, planned: Callable[[LoadPreferences], Plan], answers: int
) -> Load:
    """Return the load for this many answers decoded together, with the same weights and context window.

    Raises:
        OutOfMemoryError: there is no memory for them.
    """
    load = plan.load
    wider = replace(preferences, n_ctx=max(load.n_ctx, CONTEXT_BOUNDS[0]), parallel=answers)
    wide = planned(replace(wider, gpu_layers=load.gpu_layers, cpu_experts=len(load.cpu_experts)))
    return load.widened(wide.load)


def _tuned(header: Header, hardware: Hardware, settings: Settings, expected: ExpectedUse) -> TunableSettings | None:
    """Return the fastest settings found by `llmrun tune` for this use; None without a result."""
    found = remembered(header, hardware, settings.state_dir)
    if found is None:
        return None
    return choose(found, expected.prompt_tokens, expected.answer_tokens, own_environment=expected.own_engine)

"""`llmrun plan`: predicted memory and speed of a model on this machine, before a download."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.cli.completion import complete_model
from llmrun.cli.options import (
    DraftOption,
    JsonOption,
    RpcOption,
    engine_options,
    with_options,
    workers_of,
)
from llmrun.config import Settings, load_settings
from llmrun.errors import LlmrunError, NetworkError, OutOfMemoryError, UsageError
from llmrun.gguf.pooling import makes_embeddings
from llmrun.gguf.reader import read_header
from llmrun.models.location import find_projector, locate, not_on_disk
from llmrun.models.registry import load_catalogue
from llmrun.models.store.store import all_models
from llmrun.planning.catalogue import Estimates, propose
from llmrun.planning.estimate import (
    best,
    contexts_for,
    is_open,
    local_candidate,
    look_ahead,
    parse_contexts,
    remote_candidates,
    types_of,
)
from llmrun.planning.hardware import probe, this_machine
from llmrun.planning.pairs import DraftFile, read_draft
from llmrun.planning.predict import main_type
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.speculation import read_draft_source
from llmrun.planning.speed import gpu_speeds, speed_of
from llmrun.protocol.settings import DEVICE_SETTINGS
from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.activity import Activity
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.plan import show_estimates, show_proposals

if TYPE_CHECKING:
    from llmrun.gguf.header import Header
    from llmrun.models.registry import ModelSpec
    from llmrun.planning.estimate import QuantCandidate, QuantEstimate
    from llmrun.planning.hardware import Hardware
    from llmrun.protocol.devices import Gpu
    from llmrun.protocol.jobs.machine import MachineSpeed

ModelOrNoneArgument = Annotated[
    str,
    typer.Argument(
        metavar="[MODEL]",
        help="A name from `llmrun list --all`, owner/repo[:quant], URL or path. Default: propose models.",
        autocompletion=complete_model,
    ),
]
ContextsOption = Annotated[
    str, typer.Option("--ctx", "-c", metavar="TOKENS,...", help="Context windows to compare, e.g. 4096,32k.")
]


@with_options(engine=engine_options("kv_type_k", "kv_type_v", *DEVICE_SETTINGS))
def plan(
    model: ModelOrNoneArgument = "",
    ctx: ContextsOption = "",
    *,
    engine: dict[str, Any],
    draft: DraftOption = None,
    rpc: RpcOption = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show every quant of the repository, even if one is on this disk.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Predict memory and speed of each quant of a model on this machine.

    Without a model, propose some that fit. Downloads nothing. Speeds are predicted from the speed of llama.cpp's
    kernels here, which is measured once.
    """
    output = Output(json=json)
    if not model:
        _propose(output, is_alone=not (ctx or engine or draft or rpc or every))
        return
    lengths, workers, settings = parse_contexts(ctx), workers_of(rpc), load_settings()
    preferences = LoadPreferences(workers=workers, **engine)
    spec, candidates = _candidates(output, model, settings, every=every)
    smaller, heads = read_draft_source(draft)
    preferences = replace(preferences, draft_heads=heads)
    beside = _draft(smaller, candidates[0].header, settings) if smaller is not None else None
    hardware = this_machine(workers)
    used = preferences.gpus(hardware.gpus)  # raises before anything is measured
    hardware = _beside_projector(output, hardware, candidates[0].header, spec.modelfile.projector)
    contexts = contexts_for(candidates[0].header, lengths)
    speed, gpus = _speeds(output, hardware, used, types_of(candidates), settings)

    def estimate(candidate: QuantCandidate, hardware: Hardware) -> QuantEstimate:
        return look_ahead(candidate, hardware, speed, contexts, preferences, gpus=gpus, draft=beside)

    rows = [estimate(candidate, hardware.when_quiet) for candidate in candidates]
    fits_now = any(at.fits for candidate in candidates for at in estimate(candidate, hardware).contexts)
    chosen, why = _chosen(spec, candidates, hardware)
    if json:
        quants = [asdict(row) for row in rows]
        output.result_json(
            {
                "hardware": asdict(hardware),
                "kv_type": preferences.kv_type,
                "chosen": chosen,
                "fits_now": fits_now,
                "quants": quants,
            }
        )
    else:
        show_estimates(output, rows, hardware, why, fits_now=fits_now, speed=speed)
        if makes_embeddings(candidates[0].header):
            output.note("It is made for embeddings: PREFILL is the speed of reading texts, and nothing is decoded.")


def _propose(output: Output, *, is_alone: bool) -> None:
    """Print a few models of the catalogue for this machine, with predicted memory and speed.

    Raises:
        UsageError: an option needs a model.
    """
    if not is_alone:
        raise UsageError("these options need a model", hint="llmrun plan MODEL; llmrun plan alone proposes some")
    hardware, entries, settings = this_machine(), load_catalogue().entries.values(), load_settings()
    speed = _speed(output, hardware, {main_type(entry.quant) for entry in entries}, settings)
    found = propose(entries, Estimates(all_models(settings), hardware, speed))
    if output.json:
        models = [
            {"purpose": each.purpose, "model": each.entry.alias, "n_bytes": each.size.n_bytes} | asdict(each.estimate)
            for each in found
        ]
        output.result_json({"hardware": asdict(hardware), "models": models})
    else:
        show_proposals(output, found, hardware, speed)


def _beside_projector(output: Output, hardware: Hardware, header: Header, stored: Path | None) -> Hardware:
    """Return the machine with the memory that a model's projector leaves."""
    projector = find_projector(header.path, stored=stored)
    if not projector:
        return hardware
    n_bytes = projector.stat().st_size
    output.note(f"{projector.name}, the projector of images or audio, takes another {readable_size(n_bytes)} of memory")
    return replace(hardware, memory_available=max(hardware.memory_available - n_bytes, 0))


def _speeds(
    output: Output, hardware: Hardware, used: Sequence[Gpu], types: Collection[str], settings: Settings
) -> tuple[MachineSpeed | None, tuple[MachineSpeed, ...]]:
    """Return the speeds of this processor, None if unknown or over workers, and of the GPUs to use."""
    if hardware.workers:
        return None, ()
    return _speed(output, hardware, types, settings), _gpu_speeds(output, hardware, used, types, settings)


def _draft(name: str, header: Header, settings: Settings) -> Header:
    """Return the header of a draft model.

    Raises:
        ModelNotFoundError: the model is not on this disk, so its vocabulary is unknown.
        UsageError: its vocabulary differs from the model's.
    """
    located = locate(name, settings)
    if located.path is None:
        raise not_on_disk(name)
    draft = DraftFile.of(located.spec, located.path)
    return read_draft(header, draft) if header.path.is_file() else read_header(draft.path)


def _chosen(spec: ModelSpec, candidates: list[QuantCandidate], hardware: Hardware) -> tuple[str | None, str]:
    """Return the quant that `llmrun run` would use, None if none fits, and the reason, "" if there was no choice."""
    if not is_open(spec):
        return next(one.quant for one in candidates if one.exact), ""
    try:
        chosen, why = best(candidates, hardware, spec.alias or spec.repository or "")
    except OutOfMemoryError:
        return None, ""
    return chosen.quant, why


def _candidates(
    output: Output, name: str, settings: Settings, *, every: bool
) -> tuple[ModelSpec, list[QuantCandidate]]:
    """Return the local file or all files on the hub, and the parsed name.

    Raises:
        NetworkError: the hub can't be reached; the facts of the built-in list are printed first.
    """
    located = locate(name, settings)
    if located.path is not None and not (every and located.spec.repository):
        return located.spec, [local_candidate(located.path, read_header(located.path))]
    try:
        return located.spec, remote_candidates(located.spec, settings, output.note)
    except NetworkError:
        _show_facts(output, located.spec)
        raise


def _show_facts(output: Output, spec: ModelSpec) -> None:
    entry = load_catalogue().entries.get(spec.alias or "")
    if entry is None:
        return
    free = probe().memory_available
    output.note(
        f"{entry.title}: {entry.parameters} parameters, {entry.quant} takes {readable_size(entry.n_bytes)} "
        f"and its KV cache on top; {readable_size(free)} of memory are free"
    )


def _gpu_speeds(
    output: Output, hardware: Hardware, used: Sequence[Gpu], types: Collection[str], settings: Settings
) -> tuple[MachineSpeed, ...]:
    """Measure the GPUs to use that have memory of their own; () if that fails."""
    own = [gpu for gpu in used if not gpu.shared]
    if not own:
        return ()
    try:
        return gpu_speeds(own, types, hardware, settings.state_dir)
    except LlmrunError as error:
        output.note(f"the GPU's speed is not measured yet: {error}")
        return ()


def _speed(output: Output, hardware: Hardware, types: Collection[str], settings: Settings) -> MachineSpeed | None:
    with Activity(output) as activity:
        words = "measuring the speed of this machine, once"
        try:
            speed = speed_of(
                hardware,
                types,
                settings.state_dir,
                on_progress=lambda share: activity.show(words, share, begins=not share),
            )
        except LlmrunError as error:
            activity.note(f"{error}; so speeds are unknown")
            return None
    return speed

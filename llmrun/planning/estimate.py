"""Memory and speed of each quant of a model before a download: the rows of `llmrun plan`, and the choice of a quant.

The arithmetic is memory.py's and predict.py's. A name that leaves the quant open gets the same one from pull, show, run
and plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmrun.config import Settings, load_settings
from llmrun.errors import LlmrunError, OutOfMemoryError, UsageError
from llmrun.gguf.header import Header
from llmrun.models.registry import ModelSpec
from llmrun.planning.hardware import Hardware, this_machine
from llmrun.planning.memory import memory, repacked_types
from llmrun.planning.pairs import ResizedHeader
from llmrun.planning.placement import split_model
from llmrun.planning.plan import Plan, beyond_training, make_plan, margin, trained_context
from llmrun.planning.predict import (
    Prediction,
    Work,
    main_type,
    predict,
    tensor_types,
    work_of,
    work_of_quant,
)
from llmrun.planning.preferences import CONTEXT_BOUNDS, LoadPreferences
from llmrun.planning.speed import remembered, speed_of
from llmrun.protocol.jobs.machine import MachineSpeed
from llmrun.protocol.sizes import readable_size

if TYPE_CHECKING:
    from llmrun.models.download.transfer import OnNote
    from llmrun.models.hub import Parts, Repository


CONTEXTS = (4096, 8192, 32_768)
"""Context windows to estimate besides that of training, in tokens."""

Verdict = Literal["fits", "fits with less context", "too big"]


@dataclass(frozen=True, slots=True)
class QuantCandidate:
    """A quant that could be run."""

    quant: str  # e.g. "Q4_K_M"
    name: str  # of its (first) file
    n_bytes: int  # of all its files
    header: Header  # its own, or that of another quant of the same model
    exact: bool  # the header is its own

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors; headers of all quants of a model have nearly the same size."""
        header = self.header
        return header.weight_bytes if self.exact else self.n_bytes - (header.file_size - header.weight_bytes)


@dataclass(frozen=True, slots=True)
class ContextEstimate:
    """One quant with one context window."""

    n_ctx: int  # context window in tokens
    kv_bytes: int  # of the KV cache
    needed_bytes: int  # of memory, on all devices
    ram_bytes: int  # of that in the machine's own memory
    vram_bytes: int  # of that on GPUs
    gpu_layers: int  # -1 is all
    cpu_experts: int  # number of layers whose experts stay with the processor
    fits: bool  # with a margin for the rest of the system
    decode_rate: float | None  # tokens/s at the end of the window; None if unknown


@dataclass(frozen=True, slots=True)
class QuantEstimate:
    """One quant on this machine."""

    quant: str
    name: str  # of its (first) file
    n_bytes: int  # of all its files
    weight_bytes: int  # of its tensors
    load_seconds: float | None  # with the file in the page cache
    prefill_rate: float | None  # tokens/s of a prompt of 512 tokens
    decode_rate: float | None  # tokens/s of an answer in a short conversation
    contexts: tuple[ContextEstimate, ...]  # one for each requested window
    verdict: Verdict
    n_ctx: int  # largest context window that fits, up to that of training; 0 if none does
    notes: tuple[str, ...] = ()  # warnings about context windows, and the placement of layers


def local_candidate(path: Path, header: Header) -> QuantCandidate:
    return QuantCandidate(header.quant, path.name, header.file_size, header, True)


def remote_candidates(spec: ModelSpec, settings: Settings, on_note: OnNote) -> list[QuantCandidate]:
    """Return the quants of a repository, or the file of a link, from names, sizes and one header of the hub.

    Args:
        on_note: called before a retry, and for skipped files.

    Raises:
        NetworkError: the hub can't be reached.
        ModelNotFoundError: there is no such repository, or no model in it.
    """
    from llmrun.models import hub
    from llmrun.models.download.remote import read_remote_header

    if spec.url is not None:
        header = read_remote_header(spec.url, on_note=on_note)
        return [QuantCandidate(header.quant, header.path.name, header.file_size, header, True)]
    assert spec.repository is not None
    repository = hub.repository_files(spec.repository, spec.revision, settings, on_note)
    return candidates_of(spec, repository, settings, on_note)


def candidates_of(spec: ModelSpec, repository: Repository, settings: Settings, on_note: OnNote) -> list[QuantCandidate]:
    """Return the quants of a repository; reads the header of the spec's quant or of the usual one.

    Args:
        on_note: called before a retry.

    Raises:
        NetworkError: the header can't be read.
        ModelNotFoundError: there is no such file or quant, or no model.
    """
    from llmrun.models import hub
    from llmrun.models.download.remote import read_remote_header

    chosen = hub.choose(spec, repository.files)
    url = hub.file_url(settings, repository.id, repository.commit, chosen[0].name)
    hint = hub.login_hint(settings, repository.id)
    header = read_remote_header(url, token=hub.token(), login_hint=hint, on_note=on_note)
    return [
        QuantCandidate(quant, parts[0].name, hub.n_bytes(parts), header, parts == chosen)
        for quant, parts in hub.offers(spec, repository.files).items()
    ]


def types_of(candidates: Iterable[QuantCandidate]) -> set[str]:
    """Return the types of weights whose speeds a prediction needs."""
    types: set[str] = set()
    for candidate in candidates:
        types |= tensor_types(candidate.header.tensors) if candidate.exact else {main_type(candidate.quant)}
    return types


def contexts_for(header: Header, requested: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the requested context windows, or the usual ones up to that of training, in ascending order."""
    trained = trained_context(header)
    usual = [n_ctx for n_ctx in CONTEXTS if n_ctx < trained]
    return tuple(sorted({*requested} or {*usual, trained}))


def look_ahead(
    candidate: QuantCandidate,
    hardware: Hardware,
    speed: MachineSpeed | None,
    contexts: Sequence[int],
    preferences: LoadPreferences = LoadPreferences(),
    *,
    gpus: Sequence[MachineSpeed] = (),
    draft: Header | None = None,
) -> QuantEstimate:
    """Estimate memory and speed of one quant.

    Args:
        speed: of this machine; None leaves out speeds, as they are over workers.
        contexts: windows in tokens, see contexts_for().
        preferences: for devices and the KV cache.
        gpus: speeds of the GPUs that these choose; () if unknown.
        draft: header of a draft model, which adds to the memory.
    """
    header = candidate.header
    facts = ResizedHeader.of(header, candidate.weight_bytes, draft)
    work = work_of(header) if candidate.exact else work_of_quant(header, candidate.quant, candidate.weight_bytes)
    chosen = _plan(facts, hardware, preferences)
    copies = work.copies(repacked_types(hardware.cpu_flags))
    prediction = partial(_prediction, work, speed, gpus, preferences, copies)
    start = prediction(chosen.gpu_counts, chosen.load.cpu_experts, 0) if chosen else prediction((), (), 0)
    verdict: Verdict = "too big"
    if chosen:
        verdict = "fits" if chosen.load.n_ctx >= trained_context(header) else "fits with less context"
    return QuantEstimate(
        quant=candidate.quant,
        name=candidate.name,
        n_bytes=candidate.n_bytes,
        weight_bytes=candidate.weight_bytes,
        load_seconds=start.load_seconds if start else None,
        prefill_rate=start.prefill_rate if start else None,
        decode_rate=start.decode_rate if start else None,
        contexts=tuple(
            _context_estimate(n_ctx, facts, hardware, preferences, chosen, prediction) for n_ctx in contexts
        ),
        verdict=verdict,
        n_ctx=chosen.load.n_ctx if chosen else 0,
        notes=(
            *(note for n_ctx in contexts for note in beyond_training(header, n_ctx)),
            *(chosen.notes if chosen and hardware.workers else ()),
            *_about_heads(header, chosen),
        ),
    )


def _prediction(
    work: Work,
    speed: MachineSpeed | None,
    gpus: Sequence[MachineSpeed],
    preferences: LoadPreferences,
    copies: int,
    gpu_counts: tuple[int, ...],
    cpu_experts: tuple[int, ...],
    depth: int,
) -> Prediction | None:
    """Return load time and rates; None without measurements of all devices that hold layers.

    Experts beside a GPU, and tensors on several GPUs at once, are not predicted.
    """
    if speed is None:
        return None
    if not any(gpu_counts):
        return predict(work, speed, depth=depth, kv_type=preferences.kv_type, copies=copies)
    if not gpus or cpu_experts or preferences.split_mode == "tensor":
        return None
    return predict(work, speed, gpus, gpu_counts, depth=depth, kv_type=preferences.kv_type, copies=copies)


def _context_estimate(
    n_ctx: int,
    facts: Header,
    hardware: Hardware,
    preferences: LoadPreferences,
    chosen: Plan | None,
    prediction: Callable[[tuple[int, ...], tuple[int, ...], int], Prediction | None],
) -> ContextEstimate:
    hardware = replace(hardware, gpus=preferences.gpus(hardware.gpus))
    rollback, heads = (chosen.load.n_rollback, chosen.load.draft_heads) if chosen is not None else (0, False)
    needs = memory(facts, n_ctx, kv_type=preferences.kv_type, rollback=rollback, heads=heads)
    split = split_model(facts, needs, n_ctx, hardware, preferences)
    at_end, free = prediction(split.gpu_counts, split.cpu_experts, n_ctx), hardware.memory_available
    return ContextEstimate(
        n_ctx=n_ctx,
        kv_bytes=needs.kv,
        needed_bytes=needs.needed,
        ram_bytes=split.ram,
        vram_bytes=split.vram,
        gpu_layers=split.gpu_layers if split.vram else 0,
        cpu_experts=len(split.cpu_experts),
        fits=not hardware.memory_total or split.ram <= free - margin(free),
        decode_rate=at_end.decode_rate if at_end else None,
    )


def _about_heads(header: Header, chosen: Plan | None) -> tuple[str, ...]:
    """Return a note about the model's own prediction heads, if it has any that can draft."""
    if chosen is None or not header.can_use_heads:
        return ()
    if chosen.load.draft_heads:
        size = readable_size(chosen.draft_bytes)
        return (f"its prediction heads (MTP) draft, for {size} of the memory; --draft off leaves them out",)
    return (f"its prediction heads (MTP), {readable_size(header.head_bytes)}, are not used; --draft mtp uses them",)


def _plan(facts: Header, hardware: Hardware, preferences: LoadPreferences) -> Plan | None:
    try:
        return make_plan(facts, hardware, preferences)
    except OutOfMemoryError:
        return None


def predicted_rate(
    header: Header,
    depth: int,
    *,
    measures: bool = False,
    on_progress: Callable[[float], None] = lambda share: None,
) -> float | None:
    """Return the predicted tokens/s of a local model after this many tokens, None if unknown, as `llmrun plan` does.

    Args:
        measures: measure this machine if it never was; that takes some seconds.
    """
    candidate, folder = local_candidate(header.path, header), load_settings().state_dir
    try:
        hardware = this_machine()
        speed = remembered(hardware, folder)
        if speed is None and measures:
            speed = speed_of(hardware, types_of([candidate]), folder, on_progress)
    except LlmrunError:
        return None
    row = look_ahead(candidate, hardware.when_quiet, speed, (depth,) if depth else ())
    return row.contexts[0].decode_rate if row.contexts else row.decode_rate


def parse_contexts(text: str) -> tuple[int, ...]:
    """Parse context windows, e.g. "4096,8k".

    Raises:
        UsageError: a part is invalid.
    """
    contexts = []
    for part in filter(None, (part.strip().lower() for part in text.split(","))):
        digits, factor = (part[:-1], 1024) if part.endswith("k") else (part, 1)
        low, high = CONTEXT_BOUNDS
        if not digits.isascii() or not digits.isdecimal() or not low <= int(digits) * factor <= high:
            why = f"must be between {low:,} and {high:,}"
            raise UsageError(f"invalid --ctx {part}", why=why, hint="--ctx 4096,32k")
        contexts.append(int(digits) * factor)
    return tuple(contexts)


WORTHWHILE_CONTEXT = 4096
"""Tokens; below them, a better quant is not worth its shorter conversations."""


def is_open(spec: ModelSpec) -> bool:
    """Return whether the name leaves the quant open."""
    return spec.any_quant or (spec.filename is None and spec.quant is None)


def choose_files(spec: ModelSpec, repository: Repository, settings: Settings, on_note: OnNote) -> Parts:
    """Return the files of a repository for this machine; of a split model all parts, in order.

    Args:
        on_note: called with one line about the choice of a quant.

    Raises:
        ModelNotFoundError: there is no such file or quant; lists the others.
        OutOfMemoryError: the name leaves the quant open, and none fits.
        NetworkError: the header can't be read.
    """
    from llmrun.models import hub  # loads httpx2, which a model on this disk does not need

    if not is_open(spec):
        return hub.choose(spec, repository.files)
    chosen, why = best(
        candidates_of(spec, repository, settings, on_note), this_machine(), spec.alias or spec.repository or ""
    )
    if why:
        on_note(why)
    return hub.offers(spec, repository.files)[chosen.quant]


def best(candidates: Sequence[QuantCandidate], hardware: Hardware, name: str) -> tuple[QuantCandidate, str]:
    """Return the best quant and the reason in one line; "" if there is nothing to choose.

    The usual one if it fits with WORTHWHILE_CONTEXT, else the largest that does, else the largest that fits at all.

    Args:
        candidates: all quants of one model; the usual one has its own header.
        name: the model's, for hints.

    Raises:
        OutOfMemoryError: no quant fits.
    """
    usual = next(candidate for candidate in candidates if candidate.exact)
    n_ctx = min(trained_context(usual.header), WORTHWHILE_CONTEXT)
    rows = [(candidate, look_ahead(candidate, hardware, None, (n_ctx,))) for candidate in candidates]
    roomy = [candidate for candidate, row in rows if row.contexts[0].fits]
    if usual in roomy:
        others = ", ".join(f"{candidate.quant} ({readable_size(candidate.n_bytes)})" for candidate in candidates)
        return usual, f"{usual.quant} of {others}: the usual choice, good answers for its size" if rows[1:] else ""
    fitting = roomy or [candidate for candidate, row in rows if row.n_ctx]
    if not fitting:
        raise _nothing_fits(min(candidates, key=lambda candidate: candidate.n_bytes), hardware, name)
    chosen = max(fitting, key=lambda candidate: candidate.n_bytes)
    return chosen, (
        f"{chosen.quant} ({readable_size(chosen.n_bytes)}): {usual.quant} with {readable_size(usual.n_bytes)} "
        f"and a KV cache of {n_ctx:,} tokens does not fit into {_room(hardware)}"
    )


def _nothing_fits(smallest: QuantCandidate, hardware: Hardware, name: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"no quant of {name} fits into memory",
        why=f"the smallest, {smallest.quant}, takes {readable_size(smallest.n_bytes)}; {_room(hardware)} are free",
        hint=f"use a smaller model, or name a quant to use it all the same: {name}:{smallest.quant}",
    )


def _room(hardware: Hardware) -> str:
    """Return e.g. "5.5 GB of memory and 8.0 GB on GPUs"."""
    on_gpus = f" and {readable_size(hardware.gpu_memory_free)} on GPUs" if hardware.gpu_memory_free else ""
    return f"{readable_size(hardware.memory_available)} of memory{on_gpus}"

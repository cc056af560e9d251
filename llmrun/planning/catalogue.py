"""Estimates for models of the catalogue, and the choice of a few for this machine.

A model that is not on this disk is estimated from its file size and number of parameters alone: no network is used.
`llmrun plan MODEL` reads its header and is exact.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from llmrun.config import Settings
from llmrun.errors import LlmrunError
from llmrun.gguf.pooling import makes_embeddings
from llmrun.gguf.reader import read_header
from llmrun.models.registry import CatalogueEntry
from llmrun.models.store.installed import InstalledModel
from llmrun.models.store.store import all_models
from llmrun.planning.estimate import contexts_for, local_candidate, look_ahead
from llmrun.planning.hardware import Hardware, probe, this_machine
from llmrun.planning.plan import margin
from llmrun.planning.predict import Work, main_type, predict
from llmrun.planning.speed import remembered
from llmrun.protocol.jobs.machine import MachineSpeed
from llmrun.protocol.sizes import readable_count

USUAL_CONTEXT = 4096
"""Tokens, for which memory is estimated."""
SLOW = 5.0
"""Tokens/s below which an answer is slower than reading; no such model is proposed without saying so."""
PURPOSES = {"quick answers": 20.0, "as fast as reading": 6.0, "the largest that is usable": SLOW}
"""Purpose of a proposed model -> tokens/s that it needs at least."""
_SIZES = "small", "medium", "large"
"""What is said of proposed models where speeds are unknown."""
_OVERHEAD, _FIXED_BYTES = 0.12, 150_000_000  # of KV cache, activations and process, over the weights
_LAYERS = 32  # of most models in the catalogue
_FACTORS = {"M": 1e6, "B": 1e9}


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """A model on this machine when it is quiet."""

    memory_bytes: int  # with USUAL_CONTEXT
    fits: bool  # into memory and GPUs, with a margin for the rest of the system
    fits_now: bool  # into what is free of them
    decode_rate: float | None  # tokens/s in a short conversation; None if unknown, or nothing is decoded
    is_exact: bool = True  # from the model's header, not from the size of its file
    is_rate_estimated: bool = False  # other programs used the machine when its speed was measured


class FileSize(NamedTuple):
    """The size of a model's file."""

    parameters: str  # in words, e.g. "135M"
    quant: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """A model of the catalogue for a purpose."""

    purpose: str
    entry: CatalogueEntry
    estimate: ModelEstimate
    size: FileSize


class Estimates:
    """Estimates of models on one machine: from their headers if they are on this disk, else from their file size.

    Args:
        models: on this disk.
        hardware: as it is now.
        speed: see planning/speed.py; None leaves out speeds.
    """

    def __init__(self, models: Iterable[InstalledModel], hardware: Hardware, speed: MachineSpeed | None) -> None:
        self._models = [model for model in models if model.repository]
        self._hardware, self._speed = hardware, speed

    def file_of(self, entry: CatalogueEntry) -> Path | None:
        """Return the entry's file on this disk, of its default quant if that is there."""
        paths = [model.path for model in self._models if model.repository.lower() == entry.repository.lower()]
        usual = [path for path in paths if path.name.lower() == entry.filename(entry.quant).lower()]
        return next(iter([*usual, *paths]), None)

    def size_of(self, entry: CatalogueEntry) -> FileSize:
        """Return the size of the entry's file on this disk, or of its default file."""
        path = self.file_of(entry)
        size = size_of_file(path) if path is not None else None
        return size or FileSize(entry.parameters, entry.quant.upper(), entry.n_bytes)

    def of(self, entry: CatalogueEntry) -> ModelEstimate:
        path = self.file_of(entry)
        estimate = self.of_file(path) if path is not None else None
        return estimate or estimate_entry(entry, self._hardware, self._speed)

    def of_file(self, path: Path) -> ModelEstimate | None:
        """Return the estimate of a model on this disk; None for a damaged file."""
        return estimate_file(path, self._hardware, self._speed)

    def facts(self, entry: CatalogueEntry) -> dict[str, Any]:
        """Return what lists of models say of an entry, as JSON data."""
        about = {
            "kind": entry.kind,
            "licence": entry.license,
            "agents": entry.agents,
            "installed": self.file_of(entry) is not None,
        }
        return {**self.size_of(entry)._asdict(), **about, **asdict(self.of(entry))}

    def facts_of_file(self, model: InstalledModel) -> dict[str, Any]:
        """Return the same of a model on this disk that the catalogue lacks; None for what is unknown."""
        size = size_of_file(model.path) or FileSize("", model.quant, model.size)
        about = {"kind": "chat", "licence": "", "agents": True, "installed": True}
        estimate = self.of_file(model.path)
        estimated = asdict(estimate) if estimate else dict.fromkeys(field.name for field in fields(ModelEstimate))
        return {**size._asdict(), **about, **estimated}


def local_estimates(settings: Settings, hardware: Hardware | None = None) -> Estimates:
    """Return the estimates for this machine, from what is known of its speed.

    Args:
        hardware: None for all of it, without its GPUs if llama.cpp can't be loaded.
    """
    if hardware is None:
        try:
            hardware = this_machine()
        except LlmrunError:
            hardware = probe()
    return Estimates(all_models(settings), hardware, remembered(hardware, settings.state_dir))


def size_of_file(path: Path) -> FileSize | None:
    """Return the size of a model on this disk; None for a damaged file."""
    try:
        header = read_header(path)
    except LlmrunError:
        return None
    parameters, active = header.readable_parameters, readable_count(header.n_active_parameters)
    is_mixture = active != parameters and bool(header.n_experts)
    return FileSize(f"{parameters}, {active} active" if is_mixture else parameters, header.quant, header.file_size)


def estimate_file(path: Path, hardware: Hardware, speed: MachineSpeed | None) -> ModelEstimate | None:
    """Estimate a model on this disk; None for a damaged file."""
    try:
        header = read_header(path)
    except LlmrunError:
        return None
    n_ctx = min(*contexts_for(header), USUAL_CONTEXT)
    row = look_ahead(local_candidate(path, header), hardware.when_quiet, speed, (n_ctx,))
    now = look_ahead(local_candidate(path, header), hardware, None, (n_ctx,))
    (at,), (at_now,) = row.contexts, now.contexts
    rate = None if makes_embeddings(header) else row.decode_rate
    return ModelEstimate(at.needed_bytes, at.fits, at_now.fits, rate, is_rate_estimated=_is_estimated(speed))


def estimate_entry(entry: CatalogueEntry, hardware: Hardware, speed: MachineSpeed | None) -> ModelEstimate:
    """Estimate a model of the catalogue by its file size."""
    weights = entry.n_bytes
    needed = int(weights * (1 + _OVERHEAD)) + _FIXED_BYTES
    rooms = (state.memory_available + state.gpu_memory_free for state in (hardware.when_quiet, hardware))
    fits, fits_now = (needed + margin(room) <= room for room in rooms)
    rate = None
    if speed is not None and not hardware.gpus and entry.kind == "chat":  # the speeds of GPU kernels are not measured
        read = weights * active_share(entry.parameters)
        work = Work(
            {main_type(entry.quant): read}, {}, _LAYERS, full_layers=0, window_layers=0, window=0, kv_elements=0,
            window_kv_elements=0, heads=0, head_length=0, vocabulary=0, file_bytes={},
        )  # fmt: skip
        rate = predict(work, speed).decode_rate
    return ModelEstimate(needed, fits, fits and fits_now, rate, is_exact=False, is_rate_estimated=_is_estimated(speed))


def _is_estimated(speed: MachineSpeed | None) -> bool:
    return speed is not None and speed.is_estimated


def stated_parameters(parameters: str) -> list[float]:
    """Return the numbers in words like "30B, 3B active": of all weights, then of a token's; [0.0] for none."""
    found = re.findall(r"([\d.]+)([MB])", parameters)
    return [float(number) * _FACTORS[unit] for number, unit in found] or [0.0]


def active_share(parameters: str) -> float:
    """Return the share of the weights that one token reads: 0.1 of "30B, 3B active", 1 of "8B"."""
    counts = stated_parameters(parameters)
    return counts[-1] / counts[0] if counts[0] else 1.0


def rank(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a model is sorted by: whether it fits, is one for answers, is on this disk, and its size.

    Args:
        facts: as in `llmrun list --all --json`.
    """
    fit = 2 if facts["fits"] is False else 1 if facts["fits_now"] is False else 0
    return fit, facts["kind"] != "chat", not facts["installed"], -stated_parameters(facts["parameters"])[0]


def propose(entries: Collection[CatalogueEntry], estimates: Estimates) -> list[Proposal]:
    """Return for each purpose the largest chat model that fits and is fast enough; the fastest one if none is.

    Without speeds: a small, a middle and a large one.
    """
    chats = sorted((entry for entry in entries if entry.kind == "chat"), key=lambda entry: entry.size_mb)
    every = [(entry, estimates.of(entry)) for entry in chats]
    fitting = [candidate for candidate in every if candidate[1].fits] or every[:1]
    chosen: dict[str, Proposal] = {}
    for number, (purpose, least) in enumerate(PURPOSES.items()):
        fast = [candidate for candidate in fitting if (candidate[1].decode_rate or 0.0) >= least]
        is_known = any(estimate.decode_rate for _, estimate in fitting)
        entry, estimate = (fast or fitting[:1])[-1] if is_known else fitting[(len(fitting) - 1) * number // 2]
        purpose = _SIZES[number] if not is_known else purpose if fast else "the fastest"
        chosen.setdefault(entry.alias, Proposal(purpose, entry, estimate, estimates.size_of(entry)))
    return list(chosen.values())

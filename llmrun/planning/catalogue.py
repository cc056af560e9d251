"""Estimates for models of the catalogue, and the choice of a few for this machine.

A model that is not on this disk is estimated from its file size and number of parameters alone: no network is used.
`llmrun plan MODEL` reads its header and is exact.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import LlmrunError
from llmrun.gguf.pooling import makes_embeddings
from llmrun.gguf.reader import read_header
from llmrun.models.registry import CatalogueEntry
from llmrun.planning.estimate import contexts_for, local_candidate, look_ahead
from llmrun.planning.hardware import Hardware
from llmrun.planning.plan import margin
from llmrun.planning.predict import Work, main_type, predict
from llmrun.protocol.jobs.kernels import MachineSpeed

USUAL_CONTEXT = 4096
"""Tokens, for which memory is estimated."""
PURPOSES = {"quick answers": 20.0, "as fast as reading": 6.0, "the largest that fits": 0.0}
"""Purpose of a proposed model -> tokens/s that it needs at least."""
_OVERHEAD, _FIXED_BYTES = 0.1, 400_000_000  # of KV cache, activations and process, over the weights
_LAYERS = 32  # of most models in the catalogue
_FACTORS = {"M": 1e6, "B": 1e9}


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """A model on this machine."""

    memory_bytes: int  # with USUAL_CONTEXT
    fits: bool  # into free memory and GPUs, with a margin for the rest of the system
    decode_rate: float | None  # tokens/s in a short conversation; None if unknown, or nothing is decoded


@dataclass(frozen=True, slots=True)
class Proposal:
    """A model of the catalogue for a purpose."""

    purpose: str
    entry: CatalogueEntry
    estimate: ModelEstimate


def estimate_file(path: Path, hardware: Hardware, speed: MachineSpeed | None) -> ModelEstimate | None:
    """Estimate a model on this disk; None for a damaged file."""
    try:
        header = read_header(path)
    except LlmrunError:
        return None
    n_ctx = min(*contexts_for(header), USUAL_CONTEXT, USUAL_CONTEXT)
    row = look_ahead(local_candidate(path, header), hardware, speed, (n_ctx,))
    return ModelEstimate(
        row.contexts[0].needed_bytes, row.contexts[0].fits, None if makes_embeddings(header) else row.decode_rate
    )


def estimate_entry(entry: CatalogueEntry, hardware: Hardware, speed: MachineSpeed | None) -> ModelEstimate:
    """Estimate a model of the catalogue by its file size."""
    weights = entry.size_mb * 1_000_000
    needed = int(weights * (1 + _OVERHEAD)) + _FIXED_BYTES
    room = hardware.memory_available + hardware.gpu_memory_free
    rate = None
    if speed is not None and not hardware.gpus and entry.kind == "chat":  # the speeds of GPU kernels are not measured
        read = weights * active_share(entry.parameters)
        work = Work(
            {main_type(entry.quant): read}, {}, _LAYERS, full_layers=0, window_layers=0, window=0, kv_elements=0,
            window_kv_elements=0, heads=0, head_length=0, vocabulary=0, file_bytes={},
        )  # fmt: skip
        rate = predict(work, speed).decode_rate
    return ModelEstimate(needed, needed + margin(room) <= room, rate)


def active_share(parameters: str) -> float:
    """Return the share of the weights that one token reads: 0.1 of "30B, 3B active", 1 of "8B"."""
    counts = [float(number) * _FACTORS[unit] for number, unit in re.findall(r"([\d.]+)([MB])", parameters)]
    return counts[-1] / counts[0] if counts else 1.0


def propose(entries: Collection[CatalogueEntry], hardware: Hardware, speed: MachineSpeed | None) -> list[Proposal]:
    """Return for each purpose the largest chat model that fits and is fast enough; the smallest one if none is.

    Without speeds: a small, a middle and a large one.
    """
    chats = sorted((entry for entry in entries if entry.kind == "chat"), key=lambda entry: entry.size_mb)
    every = [(entry, estimate_entry(entry, hardware, speed)) for entry in chats]
    fitting = [each for each in every if each[1].fits] or every[:1]
    chosen: dict[str, Proposal] = {}
    for number, (purpose, least) in enumerate(PURPOSES.items()):
        fast = [each for each in fitting if (each[1].decode_rate or 0.0) >= least]
        is_known = any(estimate.decode_rate for _, estimate in fitting)
        entry, estimate = (fast or fitting[:1])[-1] if is_known else fitting[(len(fitting) - 1) * number // 2]
        chosen.setdefault(entry.alias, Proposal(purpose if fast else "the fastest", entry, estimate))
    return list(chosen.values())

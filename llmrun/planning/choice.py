"""The choice of a quant if the user names none: the one rule of pull, show, run and plan.

Must not know downloads. The memory of a quant is estimated from the header of one of them, as in `llmrun plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llmrun.config import Settings
from llmrun.errors import OutOfMemoryError
from llmrun.models import hub
from llmrun.models.download.transfer import OnNote, ignore_note
from llmrun.models.registry import ModelSpec
from llmrun.planning.estimate import QuantCandidate, candidates_of, look_ahead
from llmrun.planning.hardware import Hardware
from llmrun.planning.machine import this_machine
from llmrun.planning.plan import trained_context
from llmrun.protocol.sizes import readable_size

WORTHWHILE_CONTEXT = 4096
"""Tokens; below them, a better quant is not worth its shorter conversations."""


def is_open(spec: ModelSpec) -> bool:
    """Return whether the name leaves the quant open."""
    return spec.any_quant or (spec.filename is None and spec.quant is None)


def chooser(settings: Settings, on_note: OnNote = ignore_note) -> Callable[[ModelSpec, hub.Repository], hub.Parts]:
    """Return choose() with these settings."""
    return partial(choose, settings=settings, on_note=on_note)


def choose(spec: ModelSpec, found: hub.Repository, settings: Settings, on_note: OnNote) -> hub.Parts:
    """Return the files of a repository for this machine; of a split model all parts, in order.

    Args:
        on_note: called with one line about the choice of a quant.

    Raises:
        ModelNotFoundError: there is no such file or quant; lists the others.
        OutOfMemoryError: the name leaves the quant open, and none fits.
        NetworkError: the header can't be read.
    """
    if not is_open(spec):
        return hub.choose(spec, found.files)
    chosen, why = best(
        candidates_of(spec, found, settings, on_note), this_machine(), spec.alias or spec.repository or ""
    )
    if why:
        on_note(why)
    return hub.offers(spec, found.files)[chosen.quant]


def best(candidates: Sequence[QuantCandidate], hardware: Hardware, name: str) -> tuple[QuantCandidate, str]:
    """Return the best quant and the reason in one line; "" if there is nothing to choose.

    The usual one if it fits with WORTHWHILE_CONTEXT, else the largest that does, else the largest that fits at all.

    Args:
        candidates: all quants of one model; the usual one has its own header.
        name: the model's, for hints.

    Raises:
        OutOfMemoryError: no quant fits.
    """
    usual = next(one for one in candidates if one.exact)
    n_ctx = min(trained_context(usual.header), WORTHWHILE_CONTEXT)
    rows = [(one, look_ahead(one, hardware, None, (n_ctx,))) for one in candidates]
    roomy = [one for one, row in rows if row.contexts[0].fits]
    if usual in roomy:
        others = ", ".join(f"{one.quant} ({readable_size(one.n_bytes)})" for one in candidates)
        return usual, f"{usual.quant} of {others}: the usual choice, good answers for its size" if rows[1:] else ""
    fitting = roomy or [one for one, row in rows if row.n_ctx]
    if not fitting:
        raise _nothing_fits(min(candidates, key=lambda one: one.n_bytes), hardware, name)
    chosen = max(fitting, key=lambda one: one.n_bytes)
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
    on_gpus = sum(gpu.memory_free for gpu in hardware.gpus if not gpu.shared)
    return f"{readable_size(hardware.memory_available)} of memory" + (
        f" and {readable_size(on_gpus)} on GPUs" if on_gpus else ""
    )

"""LoRA adapters: small matrices that are added to a model's own while it computes.

Owns which ones a model is loaded with and how strongly each one counts; must not know their files (gguf/adapter.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Adapter(NamedTuple):
    """An adapter that a model is loaded with.

    Attributes:
        name: what requests call it.
        path: of its GGUF file, absolute.
        scale: how strongly it counts where a request does not say; 0 leaves it out then.
    """

    name: str
    path: str
    scale: float = 1.0


class AdapterScale(NamedTuple):
    """How strongly an adapter counts in an answer. `id` is its place in Load.adapters."""

    id: int
    scale: float


def applied(scales: Iterable[AdapterScale]) -> tuple[AdapterScale, ...]:
    """Those that change anything, in order: two answers with equal ones can be computed together."""
    return tuple(sorted(each for each in scales if each.scale))


def by_default(adapters: Sequence[Adapter]) -> tuple[AdapterScale, ...]:
    """What counts where a request does not say."""
    return applied(AdapterScale(number, adapter.scale) for number, adapter in enumerate(adapters))

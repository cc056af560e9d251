"""LoRA adapters: the ones a model is loaded with, and their scales. Must not know their files (gguf/adapter.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Adapter(NamedTuple):
    """An adapter that a model is loaded with."""

    name: str  # in requests
    path: str  # of its GGUF file, absolute
    scale: float = 1.0  # for requests that name no adapters; 0 leaves it out
    is_stored: bool = False  # a part of the model in Ollama's store: applied whatever a request names


class AdapterScale(NamedTuple):
    """The scale of an adapter in an answer."""

    id: int  # index in Load.adapters
    scale: float


def applied(scales: Iterable[AdapterScale]) -> tuple[AdapterScale, ...]:
    """Return the scales that are not 0, sorted: answers with equal ones can be computed together."""
    return tuple(sorted(each for each in scales if each.scale))


def by_default(adapters: Sequence[Adapter]) -> tuple[AdapterScale, ...]:
    """Return the scales for requests that name no adapters."""
    return applied(AdapterScale(number, adapter.scale) for number, adapter in enumerate(adapters))

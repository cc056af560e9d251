"""The parsed options of `llmrun bench` that its tests share; bench.py declares the options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.protocol.adapters import Adapter

Lists = list[str] | None


@dataclass(frozen=True, slots=True)
class BenchArguments:
    """Lists as typed; None for an option that is missing."""

    prompts: Lists
    answers: Lists
    pairs: Lists
    chats: Lists
    depths: Lists
    settings: dict[str, list[str]]  # field of EngineSettings -> its list; without missing options
    adapters: tuple[Adapter, ...]
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasurementOptions:
    """Options of the measurement; see bench.run.BenchRequest. interleave is None if not specified."""

    repetitions: int
    warm_up: bool
    interleave: bool | None
    delay: float
    with_limits: bool

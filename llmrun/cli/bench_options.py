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
    batches: Lists
    ubatches: Lists
    threads: Lists
    flash_attention: Lists
    types_k: Lists
    types_v: Lists
    repack: Lists
    gpu_layers: Lists
    n_cpu_moe: Lists
    adapters: tuple[Adapter, ...]
    workers: tuple[str, ...]

    @property
    def says_how_to_load(self) -> bool:
        lists = (self.batches, self.ubatches, self.threads, self.flash_attention, self.types_k, self.types_v)
        return any(each is not None for each in (*lists, self.repack, self.gpu_layers, self.n_cpu_moe))


@dataclass(frozen=True, slots=True)
class MeasurementOptions:
    """Options of the measurement; see bench.run.BenchRequest. interleave is None if not specified."""

    repetitions: int
    warm_up: bool
    interleave: bool | None
    delay: float
    with_limits: bool

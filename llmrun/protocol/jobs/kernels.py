"""The job that measures how fast ggml computes here what a model is made of: figures, and how they are looked up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmrun.protocol.jobs import Empty, JobKind

STAND_IN = "Q4_K"
"""Stands in for a type that can't be measured."""

LONG_ROW, SHORT_ROW = 2048, 512
"""Elements of a row of the matrices that are measured. A row costs something however short it is."""


@dataclass(frozen=True, slots=True)
class MeasureKernels:
    """Measure with so many threads.

    Attributes:
        threads: that compute; a worker's are its own.
        types: ggml's names, e.g. "Q4_K"; what it does not know is left out.
        cache: bytes of the last-level cache; 0 when that isn't known.
        worker: "HOST:PORT" of the RPC worker that is measured, "" for this machine.
        device: which of its devices.
    """

    threads: int
    types: tuple[str, ...]
    cache: int = 0
    worker: str = ""
    device: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one type of weights.

    Attributes:
        decode: (bytes, bytes/s) of matrices times one token, the smaller first; empty when it can't be measured.
        prefill: multiply-adds/s of a matrix times many tokens.
        short_rows: how many times as long a matrix takes in decode whose rows have SHORT_ROW elements, not LONG_ROW.
    """

    decode: tuple[tuple[float, float], ...] = ()
    prefill: float = 0.0
    short_rows: float = 1.0

    def at(self, size: float, row: float = LONG_ROW) -> float:
        """Bytes/s in decode when all matrices of the model have that size: caches are faster than memory.

        Args:
            row: elements of a row of these matrices; more than LONG_ROW gain nothing.
        """
        (small, fast), (large, slow) = self.decode[0], self.decode[-1]
        share = 0.0 if size <= small or small == large else min(math.log(size / small) / math.log(large / small), 1.0)
        # What a row costs besides its elements is spread over them.
        spread = max(LONG_ROW / row - 1, 0.0) / (LONG_ROW / SHORT_ROW - 1)
        return (fast + share * (slow - fast)) / (1 + max(self.short_rows - 1, 0.0) * spread)


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Figures of one machine with one number of threads.

    Attributes:
        read: bytes/s that all threads read from memory.
        operation: seconds of a small operation, mostly for the threads to meet.
        looks: KV type -> head length -> seconds for a query head to look at one position, in decode.
        prefill_looks: the same in prefill.
        types: type -> its rates.
        others: cores that other programs used while this was measured.
    """

    read: float
    operation: float
    looks: Mapping[str, Mapping[int, float]]
    prefill_looks: Mapping[str, Mapping[int, float]]
    types: Mapping[str, Rates]
    others: float = 0.0

    def decode(self, kind: str, size: float, row: float = LONG_ROW) -> float:
        """Bytes/s of this type's matrices in decode, with rows of so many elements, in a model of that size."""
        rates = self._rates(kind)
        return rates.at(size, row) if rates.decode else self.read

    def prefill(self, kind: str) -> float:
        """Multiply-adds/s of this type's matrices in prefill."""
        return self._rates(kind).prefill or self.read

    def _rates(self, kind: str) -> Rates:
        rates = self.types.get(kind, Rates())
        return rates if rates.decode else self.types.get(STAND_IN, Rates())

    def attention(self, kv_type: str, head_length: int, *, prefill: bool = False) -> float:
        """Seconds for a query head to look at one position; between measured lengths in proportion to the nearest."""
        table = (self.prefill_looks if prefill else self.looks).get(kv_type.upper(), {})
        if not table:
            return 0.0
        nearest = min(table, key=lambda length: abs(length - head_length))
        return table[nearest] * head_length / nearest


KERNELS = JobKind("kernels", MeasureKernels, Empty, MachineSpeed)

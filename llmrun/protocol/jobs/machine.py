"""The jobs about the machine that the engine runs on.

`build`: llama.cpp's build features and devices; `limits`: peak memory bandwidth and multiply-add rates; `kernels`: the
speed of ggml's kernels for a model's operations; `worker`: serve this machine's devices to engines of other machines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class Build:
    """The installed llama.cpp."""

    features: dict[str, tuple[str, ...]]  # backend -> its build features, e.g. "CPU" -> ("AVX2", "FMA")
    gpus: tuple[Gpu, ...]
    offload: bool  # the build can use a GPU
    rpc: bool = False  # the build can use RPC workers
    backends: tuple[str, ...] = ()  # in use, e.g. "CPU" and "CUDA"
    cpu_variant: str = ""  # of the processor's backend, e.g. "zen4"; "" where the build has only one
    kernels: str = ""  # instruction set of llmrun's own matrix kernels; "" where ggml's compute
    no_kernels: str = ""  # why


BUILD = JobKind("build", Empty, Empty, Build)


# The variants of the processor's backend to compare, ggml's choice first, then those with most instruction sets; none
# where the build has only one.
CPU_VARIANTS = JobKind("cpu_variants", Empty, Empty, tuple[str, ...])


@dataclass(frozen=True, slots=True)
class MeasureLimits:
    """Measure with `threads` threads."""

    n_bytes: int  # read repeatedly: the size of the model, so that caches help equally
    threads: int
    seconds: float = 0.15  # for reading, and again for multiplying


@dataclass(frozen=True, slots=True)
class MeasuredLimits:
    """The machine's peak rates."""

    read: float  # bytes/s
    int8: float  # multiply-adds/s of 8-bit integers; 0 if the processor has no instruction that we use
    half: float  # of 16-bit floats
    single: float  # of 32-bit floats


LIMITS = JobKind("limits", MeasureLimits, Empty, MeasuredLimits)


STAND_IN = "Q4_K"
"""Used for a type that can't be measured."""

LONG_ROW, SHORT_ROW = 2048, 512
"""Elements of a row of the measured matrices. Each row has a fixed cost."""


@dataclass(frozen=True, slots=True)
class MeasureKernels:
    """Measure with `threads` threads."""

    threads: int
    types: tuple[str, ...]  # ggml's names, e.g. "Q4_K"; unknown ones are left out
    cache: int = 0  # bytes of the last-level cache; 0 if unknown
    gpu: str = ""  # ggml's name of the GPU to measure, "" for the processor
    is_shared: bool = False  # other programs use the processor: measure with processor time


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one type of weights."""

    # (bytes, bytes/s) of matrices times one token, the smaller first; empty if the type can't be measured.
    decode: tuple[tuple[float, float], ...] = ()
    prefill: float = 0.0  # multiply-adds/s of a matrix times many tokens
    short_rows: float = 1.0  # decode time of a matrix with rows of SHORT_ROW elements relative to LONG_ROW

    def at(self, size: float, row: float = LONG_ROW) -> float:
        """Return bytes/s in decode for a model with matrices of `size` bytes: caches are faster than memory.

        Args:
            row: elements of a row of these matrices; more than LONG_ROW gain nothing.
        """
        (small, fast), (large, slow) = self.decode[0], self.decode[-1]
        share = 0.0 if size <= small or small == large else min(math.log(size / small) / math.log(large / small), 1.0)
        # The fixed cost of a row is spread over its elements.
        spread = max(LONG_ROW / row - 1, 0.0) / (LONG_ROW / SHORT_ROW - 1)
        return (fast + share * (slow - fast)) / (1 + max(self.short_rows - 1, 0.0) * spread)


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Figures of one machine with one number of threads."""

    read: float  # memory bandwidth of all threads, bytes/s
    operation: float  # seconds of a small operation, mostly thread synchronization
    # KV type -> head length -> seconds of attention for one query head and one position, in decode.
    attention_seconds: Mapping[str, Mapping[int, float]]
    prefill_attention_seconds: Mapping[str, Mapping[int, float]]  # the same in prefill
    types: Mapping[str, Rates]  # type -> its rates
    others: float = 0.0  # cores that other programs used during the measurement
    is_estimated: bool = False  # beside them, by processor time

    def decode(self, type_name: str, size: float, row: float = LONG_ROW) -> float:
        """Return bytes/s of a type's matrices in decode, with rows of `row` elements, in a model of `size` bytes."""
        rates = self._rates(type_name)
        return rates.at(size, row) if rates.decode else self.read

    def prefill(self, type_name: str) -> float:
        """Return multiply-adds/s of a type's matrices in prefill."""
        return self._rates(type_name).prefill or self.read

    def _rates(self, type_name: str) -> Rates:
        rates = self.types.get(type_name, Rates())
        return rates if rates.decode else self.types.get(STAND_IN, Rates())

    def attention(self, kv_type: str, head_length: int, *, prefill: bool = False) -> float:
        """Return seconds of attention for one query head and one position, scaled from the nearest measured length."""
        table = (self.prefill_attention_seconds if prefill else self.attention_seconds).get(kv_type.upper(), {})
        if not table:
            return 0.0
        nearest = min(table, key=lambda length: abs(length - head_length))
        return table[nearest] * head_length / nearest


KERNELS = JobKind("kernels", MeasureKernels, float, MachineSpeed)


@dataclass(frozen=True, slots=True)
class ServeDevices:
    """Serve devices."""

    endpoint: str  # "ADDRESS:PORT" to listen on, an IPv4 address
    threads: int  # of the processor
    cache: str = ""  # folder that caches weights, so that they need not be sent again; "" for none


@dataclass(frozen=True, slots=True)
class ServedDevices:
    """The served devices, sent just before the worker listens."""

    devices: tuple[Gpu, ...]  # GPUs, or the processor if there are none
    build: str  # ggml's version and commit


WORKER = JobKind("worker", ServeDevices, ServedDevices, Empty)

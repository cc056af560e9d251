"""The job `build`: the build features and devices of the installed llama.cpp."""

from __future__ import annotations

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
    cpu_variants: tuple[str, ...] = ()  # that this processor can run, the one with most instruction sets first


BUILD = JobKind("build", Empty, Empty, Build)

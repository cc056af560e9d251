"""The job that tells what llama.cpp was built with, and on what it can compute."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class Build:
    """What the installed llama.cpp is.

    Attributes:
        features: backend -> what it was built with, e.g. "CPU" -> ("AVX2", "FMA").
        gpus: that it sees.
        offload: whether a GPU could be used at all.
        rpc: whether layers can lie on other machines.
    """

    features: dict[str, tuple[str, ...]]
    gpus: tuple[Gpu, ...]
    offload: bool
    rpc: bool = False


BUILD = JobKind("build", Empty, Empty, Build)

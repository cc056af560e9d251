"""The job `build`: the build features and devices of the installed llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Callable

from llmrun import _native
from llmrun.engine.llama.devices import backends, features, gpus, supports_offload
from llmrun.engine.llama.library import cpu_variant, runnable_variants, start
from llmrun.engine.llama.rpc import is_built
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.build import Build


def parse_system_info(text: str) -> dict[str, tuple[str, ...]]:
    """Parse llama_print_system_info's "CPU : AVX2 = 1 | FMA = 1 | CUDA : ARCHS = 500 | ": backend -> features."""
    found: dict[str, tuple[str, ...]] = {}
    backend = ""
    for part in text.split("|"):
        named, _, rest = part.rpartition(" : ")
        backend = named.strip() or backend
        feature = re.match(r"\s*(\w+) = (.+)", rest)
        if feature and feature[2].strip() != "0":
            found[backend] = (*found.get(backend, ()), feature[1])
    return found


def run(command: Empty, report: Callable[[Empty], None], flag: _native.CancelFlag) -> Build:
    start()
    return Build(
        parse_system_info(features()),
        gpus(),
        supports_offload(),
        is_built(),
        tuple(backends()),
        cpu_variant(),
        runnable_variants(),
    )

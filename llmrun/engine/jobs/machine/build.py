"""What the installed llama.cpp was built with, and on what it can compute.

Owns asking; must not know what follows from it. main() prints it as one line of JSON.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from llmrun.engine.llama.devices import features, gpus, supports_offload


def parse_system_info(text: str) -> dict[str, list[str]]:
    """Backend -> its features, from llama_print_system_info's "CPU : AVX2 = 1 | FMA = 1 | CUDA : ARCHS = 500 | "."""
    found: dict[str, list[str]] = {}
    backend = ""
    for part in text.split("|"):
        named, _, rest = part.rpartition(" : ")
        backend = named.strip() or backend
        feature = re.match(r"\s*(\w+) = (.+)", rest)
        if feature and feature[2].strip() != "0":
            found.setdefault(backend, []).append(feature[1])
    return found


def describe() -> dict[str, Any]:
    """Features by backend, the GPUs, and whether a GPU could be used at all."""
    return {"features": parse_system_info(features()), "gpus": gpus(), "offload": supports_offload()}


def main() -> None:
    """Describe and print."""
    from llmrun.engine.jobs.machine.kernels import start_llama

    result = os.dup(1)
    os.dup2(2, 1)  # what the library prints goes to stderr
    start_llama()
    os.write(result, json.dumps(describe()).encode())

"""This machine with its GPUs, which only an engine can list.

An engine takes some tenths of a second to start, so none is asked if llama.cpp was built for processors alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmrun.planning.hardware import Hardware, probe
from llmrun.protocol.llama_folder import backend_folders

_MOST_SECONDS = 60.0  # the first start of a driver may take ten
_BACKEND = re.compile(r"(?:lib)?ggml-(\w+?)\.(?:so|dylib|dll)$")
_WITHOUT_GPU = re.compile(r"base|blas|cpu\w*|zdnn|zendnn|rpc")


def this_machine(workers: Sequence[str] = ()) -> Hardware:
    """Return the current state of the machine, with GPUs and their free memory.

    Args:
        workers: endpoints of RPC workers to ask.

    Raises:
        EngineCrashedError: llama.cpp can't be loaded.
        NetworkError: a worker can't be used.
    """
    hardware = probe()
    if workers:
        from llmrun.runner.workers import ask_all

        hardware = replace(hardware, workers=ask_all(workers))
    return _with_gpus(hardware) if any(map(is_built_for_gpus, backend_folders())) else hardware


def is_built_for_gpus(folder: Path) -> bool:
    """Return whether a folder has a library of llama.cpp that computes on GPUs."""
    found = [_BACKEND.match(file.name) for file in folder.iterdir()] if folder.is_dir() else []
    return any(each and not _WITHOUT_GPU.fullmatch(each[1]) for each in found)


def _with_gpus(hardware: Hardware) -> Hardware:
    """Ask this command's prestarted engine, if any: it may have begun to fill a GPU."""
    from contextlib import closing, nullcontext

    from llmrun.protocol.jobs import Empty
    from llmrun.protocol.jobs.build import BUILD
    from llmrun.runner import client, launch

    is_own = not launch.has_prestarted or not client.prestarted().alive
    engine = client.EngineClient() if is_own else client.prestarted()
    with closing(engine) if is_own else nullcontext():
        return replace(hardware, gpus=engine.do(BUILD, Empty(), seconds=_MOST_SECONDS if is_own else None).gpus)

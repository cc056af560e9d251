"""What `llmrun doctor` finds out: is everything here that a model needs, and what will be used of it.

Owns the examination and its words; must not print, load a model or touch llama.cpp. Everything is looked at
afresh, nothing is changed.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from llmrun.config import Settings
from llmrun.errors import LlmrunError
from llmrun.hardware import Hardware, probe
from llmrun.messages import Loaded
from llmrun.models.registry import load_catalogue
from llmrun.plan import readable_size

Status = Literal["ok", "warning", "problem"]

_LITTLE_MEMORY = 1 << 30  # below that hardly more than the default model fits
_LITTLE_DISK = 2 << 30
_LIBRARY_NAMES = ("libllama.so", "libllama.dylib", "llama.dll")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what, in a word or two.
        status: "ok", "warning" (works, but worse than it could) or "problem" (something will fail).
        text: what was found.
        fix: what to do about it; "" when there is nothing to do.
    """

    topic: str
    status: Status
    text: str
    fix: str = ""


def examine(
    settings: Settings,
    *,
    hardware: Hardware | None = None,
    installed: int | None = None,
    engine: Loaded | None = None,
) -> list[Finding]:
    """Look at everything, in the order in which a person wants to read it.

    Args:
        settings: which directories to look at.
        hardware: the machine; None looks.
        installed: how many models are on this disk, if that was counted.
        engine: what a running engine said about itself, if one was started.
    """
    machine = hardware or probe()
    return [
        *_versions(),
        _llama_library(),
        _native_sampler(),
        _processor(machine),
        _threads(machine),
        _memory(machine),
        _directory("hub cache", settings.hub_cache),
        _directory("state", settings.state_dir),
        *_models(installed),
        *([_engine(engine)] if engine else []),
    ]


# ---- software --------------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} ({platform.platform(terse=True)})")
    yield _version("llmrun", "warning", "pip install -e .")  # a checkout runs without being installed
    yield _version("llama-cpp-python", "problem", "pip install llama-cpp-python")


def _version(package: str, missing: Status, fix: str) -> Finding:
    try:
        return Finding(package, "ok", metadata.version(package))
    except metadata.PackageNotFoundError:
        return Finding(package, missing, "not installed", fix)


def _llama_library() -> Finding:
    topic = "llama.cpp library"
    spec = util.find_spec("llama_cpp")  # finds the package without running it
    for folder in spec.submodule_search_locations or () if spec else ():
        for name in _LIBRARY_NAMES:
            library = Path(folder, "lib", name)
            if library.is_file():
                return Finding(topic, "ok", str(library))
    fix = "pip install --force-reinstall llama-cpp-python"
    return Finding(topic, "problem", "not found, so no model can be loaded", fix)


def _native_sampler() -> Finding:
    topic = "native sampler"
    try:
        from llmrun import _native
    except ImportError as error:
        return Finding(topic, "problem", f"can't be loaded: {error}", "install llmrun again")
    return Finding(topic, "ok", str(_native.__file__))


# ---- machine ---------------------------------------------------------------------------------------


def _processor(machine: Hardware) -> Finding:
    text = f"{machine.cpu_name} ({', '.join(machine.cpu_flags) or 'features unknown'})"
    if "avx" in machine.cpu_flags and "avx2" not in machine.cpu_flags:
        return Finding("processor", "warning", f"{text}: without AVX2 answers come slowly")
    return Finding("processor", "ok", text)


def _threads(machine: Hardware) -> Finding:
    text = (
        f"{machine.usable_cores} used: {machine.physical_cores} cores, "
        f"{machine.logical_cores} hardware threads for this process"
    )
    if machine.cpu_quota is None or machine.cpu_quota >= machine.physical_cores:
        return Finding("threads", "ok", text)
    text += f", of which the container may use {machine.cpu_quota:g} at a time"
    return Finding("threads", "warning", text, "give the container more processor time")


def _memory(machine: Hardware) -> Finding:
    if not machine.memory_total:
        return Finding("memory", "warning", "unknown, so a model that is too large is not refused")
    total, free = readable_size(machine.memory_total), readable_size(machine.memory_available)
    if machine.memory_available < _LITTLE_MEMORY:
        return Finding("memory", "warning", f"only {free} of {total} free", "close other programs")
    return Finding("memory", "ok", f"{free} of {total} free")


# ---- disk ------------------------------------------------------------------------------------------


def _directory(topic: str, path: Path) -> Finding:
    existing = next((place for place in (path, *path.parents) if _exists(place)), path)
    if not existing.is_dir():
        return Finding(topic, "problem", f"{existing} is no directory", f"move {existing} away")
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(topic, "problem", f"{existing} can't be written to", f"change the owner of {existing}")
    free = shutil.disk_usage(existing).free
    text = f"{path} ({'' if existing == path else 'not there yet, '}{readable_size(free)} free)"
    if free < _LITTLE_DISK:
        return Finding(topic, "warning", text, "remove models that are not needed; `llmrun list` shows them")
    return Finding(topic, "ok", text)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # then the first parent that can be seen tells why
        return False


def _models(installed: int | None) -> Iterator[Finding]:
    try:
        catalogue = load_catalogue()
    except LlmrunError as error:
        yield Finding("catalogue", "problem", str(error), error.hint)
    else:
        count = len(catalogue.entries)
        yield Finding("catalogue", "ok", f"{count} models by short name, {catalogue.default} by default")
    if installed == 0:
        yield Finding("models", "ok", "none on this disk yet", "`llmrun run` fetches one")
    elif installed is not None:
        yield Finding("models", "ok", f"{installed} on this disk")


# ---- engine ----------------------------------------------------------------------------------------


def _engine(engine: Loaded) -> Finding:
    devices = ", ".join(engine.devices) or "no device named"
    return Finding("engine", "ok", f"{engine.description} in {engine.load_seconds:.1f} s on {devices}")

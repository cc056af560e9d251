"""The machine's description, stored with every result.

Owns gathering and naming; hardware.py probes. Anonymous: no host name, no user, no paths, and of
the kernel only its number, so that results can be shared.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from llmrun.bench.results import Machine
from llmrun.planning.hardware import Hardware, probe, probe_details
from llmrun.protocol.llama_folder import llama_version
from llmrun.system import read_text

_MOST_BYTES = 1 << 20
_CONTAINERS = (".dockerenv", "run/.containerenv")
# Parts of a processor's name without information.
_PADDING = re.compile(
    r"\((?:r|tm)\)|\b(?:intel|amd|processor|cpu|technologies|generation|\d+th gen)\b|(?: w/| with | @ ).*",
    re.IGNORECASE,
)


def describe(
    hardware: Hardware | None = None,
    *,
    name: str = "",
    build_commit: str = "",
    root: Path = Path("/"),
) -> Machine:
    """Describe this machine, in a few milliseconds and without an engine.

    Args:
        hardware: if it has been probed already.
        name: a label; by default, processor and fingerprint.
        build_commit: of ggml, as the engine reports it.
        root: folder with proc, sys and etc; tests pass samples.
    """
    import llmrun

    hardware = hardware or probe(root)
    details = probe_details(root)
    machine = Machine(
        name=name,
        cpu=hardware.cpu_name,
        cpu_flags=hardware.cpu_flags,
        cores=hardware.physical_cores,
        threads=hardware.usable_cores,
        cpu_quota=hardware.cpu_quota,
        memory_total=hardware.memory_total,
        memory_speed=details.memory_kind,
        gpus=tuple(gpu.description for gpu in hardware.gpus),
        os=_system(root),
        kernel=_kernel(root),
        governor=details.governor,
        python=".".join(map(str, sys.version_info[:3])),
        llmrun=llmrun.__version__,
        llama=llama_version(),
        build_commit=build_commit,
    )
    return machine if name else replace(machine, name=label(machine))


def fingerprint(machine: Machine) -> str:
    """Return six hex digits of the facts that reboots and updates keep; equal machines share them."""
    # In whole GiB: the firmware's share of the memory changes.
    facts = [machine.cpu, machine.cpu_flags, machine.cores, machine.threads, machine.memory_total >> 30, machine.gpus]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:6]


def label(machine: Machine) -> str:
    """Return a name without the user's or the host's, e.g. "ryzen-7-7840u-3fa2c1"."""
    words = re.findall(r"[a-z0-9]+", _PADDING.sub(" ", machine.cpu).lower())
    return "-".join([*(words[:4] or ["machine"]), fingerprint(machine)])


def _system(root: Path) -> str:
    import platform

    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    if not sys.platform.startswith("linux"):
        return f"{platform.system()} {platform.release()}"
    fields = dict(re.findall(r'^(\w+)="?(.*?)"?$', read_text(root / "etc/os-release", _MOST_BYTES), re.M))
    name = fields.get("PRETTY_NAME") or fields.get("NAME") or "Linux"
    inside = any((root / mark).exists() for mark in _CONTAINERS)
    return f"{name}, in a container" if inside else name


def _kernel(root: Path) -> str:
    import platform

    # Anything may follow the number, even a host's name.
    number = re.match(r"[\d.]*\d", platform.release())
    text = f"{platform.system()} {number[0] if number else ''}".strip()
    flags = re.search(r"^flags\s*:(.*)$", read_text(root / "proc/cpuinfo", 8192), re.M)
    return f"{text}, virtual machine" if flags and " hypervisor" in flags[1] else text

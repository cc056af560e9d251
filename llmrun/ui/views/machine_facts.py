"""The machine of a result as names and values. Owns the words; must not inspect the machine."""

from __future__ import annotations

from llmrun.bench.results import Machine
from llmrun.protocol.sizes import readable_size


def machine_facts(machine: Machine) -> list[tuple[str, str]]:
    """Return (name, value) of all known facts. Results can be from other machines, so the texts are untrusted."""
    facts = [
        ("Machine", machine.name),
        ("Processor", machine.cpu),
        ("Kernels for", ", ".join(machine.cpu_flags)),
        ("Cores", f"{machine.cores}, and {machine.threads} threads can compute at a time" if machine.cores else ""),
        ("Limit of the container", f"{machine.cpu_quota:g} cores" if machine.cpu_quota else ""),
        ("Memory", readable_size(machine.memory_total) if machine.memory_total else ""),
        ("Memory speed", machine.memory_speed),
        ("GPUs", ", ".join(machine.gpus)),
        ("System", ", ".join(filter(None, (machine.os, machine.kernel)))),
        ("Frequency governor", machine.governor),
        ("llmrun", machine.llmrun),
        ("llama-cpp-python", machine.llama),
        ("ggml", machine.build_commit),
        ("Python", machine.python),
    ]
    return [(name, value) for name, value in facts if value]

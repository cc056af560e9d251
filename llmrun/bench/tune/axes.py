"""What can be tried: each setting with the values that make sense for a model on a machine.

Owns which values those are, and in which order they are worth trying; must not know how fast anything is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmrun.gguf.header import Header
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import repacked_types
from llmrun.planning.settings import EngineSettings, words

PREFILL, DECODE = "prefill", "decode"
"""What can be made faster; they want different settings."""

Change = tuple[tuple[str, Any], ...]
"""Fields of EngineSettings and what they become."""

_UBATCHES = (256, 128)
_SPINS = (0, 300_000)  # passive waiting; and libgomp's own default
_COPIES = 2.2  # times its weights a model takes while it is read into memory beside one that is there
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing to try.

    Attributes:
        name: in words.
        changes: values to try.
        goals: which of PREFILL and DECODE it can change.
        at_depth: it matters behind many tokens only.
        whole_batch: it matters for prompts of a whole batch only.
        wants_quiet: what is best while other programs compute is not what is best without them.
    """

    name: str
    changes: tuple[Change, ...]
    goals: tuple[str, ...]
    at_depth: bool = False
    whole_batch: bool = False
    wants_quiet: bool = False

    def rivals(self, settings: EngineSettings) -> dict[EngineSettings, str]:
        """Other settings that this axis leads to, with the change in words."""
        found = {replace(settings, **dict(change)): change for change in self.changes}
        found.pop(settings, None)
        return {rival: ", ".join(words(*part) for part in change) for rival, change in found.items()}


def axes_for(header: Header, hardware: Hardware, default: EngineSettings, *, kv: bool = False) -> tuple[Axis, ...]:
    """What to try, the most promising first; what needs the model to be loaded again comes late.

    Args:
        kv: the KV cache may be quantized, which loses precision.
    """
    both = (PREFILL, DECODE)
    flips = "on" if default.flash_attention == "off" else "off"
    counts = thread_counts(hardware)
    found = [
        Axis("threads", _values("threads", counts), (DECODE,), wants_quiet=True),
        Axis("batch threads", _values("threads_batch", counts), (PREFILL,), wants_quiet=True),
    ]
    if set(header.bytes_per_type) & repacked_types(hardware.cpu_flags):
        found.append(Axis("repack", _values("repack", (not default.repack,)), both))
    if default.kv_type == "f16":  # a quantized cache needs flash attention
        found.append(Axis("flash attention", _values("flash_attention", (flips,)), both, at_depth=True))
    if kv:
        quantized = (("kv_type", "q8_0"), ("flash_attention", "on"))
        found.append(Axis("KV type", (quantized,), both, at_depth=True))
    found.append(Axis("ubatch", _values("n_ubatch", _UBATCHES), (PREFILL,), whole_batch=True))
    found += _memory_axes(header, hardware, huge_pages=_HUGE_PAGES)
    return tuple(found)


def thread_counts(hardware: Hardware) -> tuple[int, ...]:
    """Numbers of threads that may be fastest: all cores, all hardware threads, and parts of the cores."""
    cores = hardware.usable_cores
    counts = {cores, cores - 1, -(-cores * 3 // 4), -(-cores // 2), -(-cores // 4)}
    if hardware.cpu_quota is None:
        counts.add(hardware.logical_cores)
    return tuple(sorted((count for count in counts if count > 0), reverse=True))


def _memory_axes(header: Header, hardware: Hardware, *, huge_pages: Path) -> list[Axis]:
    """Pages of 2 MiB: a mapped file never has them, weights that were read or brought into another order may."""
    if not sys.platform.startswith("linux"):
        return []
    changes: list[Change] = []
    reads = hardware.memory_available > _COPIES * header.weight_bytes
    policy = _policy(huge_pages)
    if policy == "madvise":
        changes.append((("huge_pages", True),))
        if reads:
            changes.append((("huge_pages", True), ("mmap", False)))
    elif policy == "always" and reads:
        changes.append((("mmap", False),))
    memory = [Axis("huge pages", tuple(changes), (DECODE, PREFILL))] if changes else []
    return [*memory, Axis("waiting", _values("spins", _SPINS), (DECODE,), wants_quiet=True)]


def _policy(file: Path) -> str:
    """Who gets huge pages from Linux: "always", "madvise" (those who ask) or "never"."""
    try:
        found = re.search(r"\[(\w+)\]", file.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return "never"
    return found[1] if found else "never"


def _values(name: str, values: Sequence[Any]) -> tuple[Change, ...]:
    return tuple(((name, value),) for value in values)

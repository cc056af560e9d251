"""The settings to try, with the values that make sense for a model on a machine.

Owns the values and their order; must not know how fast anything is.
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
from llmrun.planning.memory import MOST_UBATCH, UBATCH, repacked_types
from llmrun.planning.settings import TunableSettings, words
from llmrun.protocol.devices import SPLIT_MODES
from llmrun.system import read_text

PREFILL, DECODE = "prefill", "decode"
"""Goals of tuning; they want different settings."""

Change = tuple[tuple[str, Any], ...]
"""Fields of TunableSettings with their new values."""

_UBATCHES, _LARGER_UBATCHES = (256, 128), (1024, MOST_UBATCH)
_SPINS = (0, 300_000)  # passive waiting; and libgomp's own default
_MOST_VARIANTS = 3  # others have far fewer instruction sets
_COPIES = 2.2  # memory, in sizes of the weights, to read them beside a copy that is loaded
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting to try."""

    name: str
    changes: tuple[Change, ...]  # the values to try
    goals: tuple[str, ...]  # which of PREFILL and DECODE it affects
    at_depth: bool = False  # it matters only with many tokens in the context
    whole_batch: bool = False  # it matters only for prompts of a whole batch
    wants_quiet: bool = False  # the best value differs while other programs compute

    def rivals(self, settings: TunableSettings) -> dict[TunableSettings, str]:
        """Return the other settings along this axis, each with its change in words."""
        found = {replace(settings, **dict(change)): change for change in self.changes}
        found.pop(settings, None)
        return {
            candidate: ", ".join(dict.fromkeys(words(*part) for part in change)) for candidate, change in found.items()
        }


def most_ubatch(header: Header, hardware: Hardware) -> int:
    """Return the tokens of the largest micro-batch to try.

    A micro-batch reads all experts, or copies the weights in RAM to a GPU, once for all of its tokens.
    """
    return MOST_UBATCH if hardware.gpus or header.expert_bytes else UBATCH


def axes_for(
    header: Header,
    hardware: Hardware,
    default: TunableSettings,
    *,
    kv: bool = False,
    n_batch: int = UBATCH,
    n_gpus: int = 0,
    cpu_variants: Sequence[str] = (),
) -> tuple[Axis, ...]:
    """Return the axes to try, the most promising first; axes that load the model again come late.

    Args:
        kv: include a quantized KV cache, which loses precision.
        n_batch: tokens of a batch, and of the largest micro-batch that there is memory for.
        n_gpus: number of GPUs that hold the model.
        cpu_variants: of the processor's backend that can run here, the default first.
    """
    both = (PREFILL, DECODE)
    flips = "on" if default.flash_attention == "off" else "off"
    counts = thread_counts(hardware)
    found = [
        Axis("threads", _values("threads", counts), (DECODE,), wants_quiet=True),
        Axis("batch threads", _values("threads_batch", counts), (PREFILL,), wants_quiet=True),
    ]
    if n_gpus > 1:
        found.insert(0, Axis("split mode", _values("split_mode", SPLIT_MODES), both))
    if set(header.bytes_per_type) & repacked_types(hardware.cpu_flags):
        found.append(Axis("repack", _values("repack", (not default.repack,)), both))
    if len(cpu_variants) > 1:
        found.append(Axis("processor variant", _values("cpu_variant", cpu_variants[1 : 1 + _MOST_VARIANTS]), both))
    if default.kv_type_v == "f16":  # a quantized cache needs flash attention
        found.append(Axis("flash attention", _values("flash_attention", (flips,)), both, at_depth=True))
    if kv:
        quantized = (("kv_type_k", "q8_0"), ("kv_type_v", "q8_0"), ("flash_attention", "on"))
        found.append(Axis("KV type", (quantized,), both, at_depth=True))
    found.append(Axis("ubatch", _values("n_ubatch", _UBATCHES), (PREFILL,), whole_batch=True))
    larger = [_values("n_ubatch", (count,)) for count in _LARGER_UBATCHES if count <= n_batch]
    found += [Axis("larger ubatch", changes, (PREFILL,), whole_batch=True) for changes in larger]
    found += _memory_axes(header, hardware, huge_pages=_HUGE_PAGES)
    return tuple(found)


def thread_counts(hardware: Hardware) -> tuple[int, ...]:
    """Return thread counts that may be fastest: all cores, all hardware threads, and parts of the cores."""
    cores = hardware.usable_cores
    counts = {cores, cores - 1, -(-cores * 3 // 4), -(-cores // 2), -(-cores // 4)}
    if hardware.cpu_quota is None:
        counts.add(hardware.logical_cores)
    return tuple(sorted((count for count in counts if count > 0), reverse=True))


def _memory_axes(header: Header, hardware: Hardware, *, huge_pages: Path) -> list[Axis]:
    """Return the axes of huge pages (a mapped file has none; weights read or repacked may) and of waiting threads."""
    if not sys.platform.startswith("linux"):
        return []
    changes: list[Change] = []
    reads = hardware.memory_available > _COPIES * header.weight_bytes
    found = re.search(r"\[(\w+)\]", read_text(huge_pages))
    policy = found[1] if found else "never"
    if policy == "madvise":  # on request
        changes.append((("huge_pages", True),))
        if reads:
            changes.append((("huge_pages", True), ("mmap", False)))
    elif policy == "always" and reads:
        changes.append((("mmap", False),))
    memory = [Axis("huge pages", tuple(changes), (DECODE, PREFILL))] if changes else []
    return [*memory, Axis("waiting", _values("spins", _SPINS), (DECODE,), wants_quiet=True)]


def _values(name: str, values: Sequence[Any]) -> tuple[Change, ...]:
    return tuple(((name, value),) for value in values)

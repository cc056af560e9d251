"""Target size of a quantized file: parsing of sizes, and the size that fits into memory. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmrun.errors import OutOfMemoryError, UsageError
from llmrun.gguf.header import Header
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import memory
from llmrun.planning.plan import margin, trained_context
from llmrun.protocol.sizes import readable_size

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) ?([kmgt]?)(i?)b?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MIN_BITS = 1.0
"""No type has fewer."""


@dataclass(frozen=True, slots=True)
class SizeGoal:
    """Target size instead of a type; false if none is set."""

    n_bytes: int = 0  # upper bound of the file's size; 0 if not set
    bits: float = 0.0  # average per weight; 0 if not set
    fits: bool = False  # the largest size that fits into memory beside a context window ...
    n_ctx: int | None = None  # ... of N tokens; None for the trained context
    label: str = ""  # for the file's name, e.g. "4.5bpw"

    def __bool__(self) -> bool:
        return bool(self.n_bytes or self.bits or self.fits)


def read_size(text: str) -> int:
    """Parse "4GB", "900 MB", "3.5GiB" or "120000000" into bytes. Raises UsageError if the text is not a size."""
    found = _SIZE.fullmatch(text.strip())
    n_bytes = int(float(found[1]) * (1024 if found[3] else 1000) ** _UNITS[found[2].lower()]) if found else 0
    if n_bytes <= 0:
        raise UsageError(f"--size {text} is not a size", hint="--size 4GB, --size 900MB or --size 3.5GiB")
    return n_bytes


def goal_bytes(goal: SizeGoal, header: Header, hardware: Hardware) -> int:
    """Return the file size of a goal.

    Raises:
        UsageError: the model is not larger than that, or can't be made so small.
        OutOfMemoryError: no type makes the model fit into memory.
    """
    head = header.file_size - header.weight_bytes
    target = goal.n_bytes
    if goal.bits:
        target = head + int(goal.bits * header.n_parameters / 8)
    elif goal.fits:
        target = _largest_fitting(header, hardware, goal.n_ctx)
    if target >= header.file_size and goal.fits:
        raise UsageError(f"{header.path.name!r} fits into memory as it is", hint="name a --type to make it smaller")
    if target >= header.file_size:
        raise UsageError(
            f"{header.path.name!r} is not larger than that already",
            why=f"it has {readable_size(header.file_size)}, {header.bits_per_weight:.2f} bits per weight; "
            f"{readable_size(target)} are allowed",
            hint="choose a smaller size, or name a --type",
        )
    minimum = head + int(_MIN_BITS * header.n_parameters / 8)
    if target < minimum:
        raise UsageError(
            f"{header.path.name!r} can't be made as small as {readable_size(target)}",
            why=f"{header.n_parameters:,} weights of {_MIN_BITS:g} bit each take {readable_size(minimum)}",
            hint="choose a smaller model",
        )
    return target


def _largest_fitting(header: Header, hardware: Hardware, n_ctx: int | None) -> int:
    window = n_ctx or trained_context(header)
    free = hardware.memory_available
    overhead = memory(header, window, start=window if hardware.kv_on_use else None).needed - header.weight_bytes
    room = free - margin(free) - overhead
    if room <= header.n_parameters * _MIN_BITS / 8:
        raise OutOfMemoryError(
            f"no type makes {header.path.name!r} fit into memory",
            why=f"{readable_size(free)} are free, and {window:,} tokens of context take {readable_size(overhead)}",
            hint="choose a smaller context: --fit --ctx 4096" if window > 4096 else "choose a smaller model",
        )
    return room

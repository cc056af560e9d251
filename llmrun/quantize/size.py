"""How large the new file should be: what people type, and what this machine can hold. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmrun.errors import OutOfMemoryError, UsageError
from llmrun.gguf.header import Header
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import memory
from llmrun.planning.plan import margin, trained_context
from llmrun.protocol.sizes import readable_size

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MIN_BITS = 1.0
"""No type has fewer: nothing smaller is worth a try."""


@dataclass(frozen=True, slots=True)
class SizeGoal:
    """What size a file should have, in place of a type; without any wish it is false.

    Attributes:
        n_bytes: of the file at most; 0 is no wish.
        bits: for a weight on average; 0 is no wish.
        fits: as much as this machine's memory holds beside a context window.
        n_ctx: of so many tokens; None is what the model was trained on.
        label: for the file's name, e.g. "4.5bpw".
    """

    n_bytes: int = 0
    bits: float = 0.0
    fits: bool = False
    n_ctx: int | None = None
    label: str = ""

    def __bool__(self) -> bool:
        return bool(self.n_bytes or self.bits or self.fits)


def read_size(text: str) -> int:
    """Bytes, from "4GB", "900 MB", "3.5GiB" or "120000000".

    Raises:
        UsageError: that is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    n_bytes = int(float(found[1]) * (1024 if found[3] else 1000) ** _UNITS[found[2].lower()]) if found else 0
    if n_bytes <= 0:
        raise UsageError(f"--size {text} is not a size", hint="--size 4GB, --size 900MB or --size 3.5GiB")
    return n_bytes


def goal_bytes(goal: SizeGoal, header: Header, hardware: Hardware) -> int:
    """The file size that a goal comes to.

    Raises:
        UsageError: the model has that size already, or it can't be made so small.
        OutOfMemoryError: no type makes the model fit into memory.
    """
    head = header.file_size - header.weight_bytes
    wanted = goal.n_bytes
    if goal.bits:
        wanted = head + int(goal.bits * header.n_parameters / 8)
    elif goal.fits:
        wanted = _fitting(header, hardware, goal.n_ctx)
    if wanted >= header.file_size and goal.fits:
        raise UsageError(f"{header.path.name!r} fits into memory as it is", hint="name a --type to make it smaller")
    if wanted >= header.file_size:
        raise UsageError(
            f"{header.path.name!r} is not larger than that already",
            why=f"it has {readable_size(header.file_size)}, {header.bits_per_weight:.2f} bits a weight; "
            f"{readable_size(wanted)} are allowed",
            hint="ask for less, or name a --type",
        )
    least = head + int(_MIN_BITS * header.n_parameters / 8)
    if wanted < least:
        raise UsageError(
            f"{header.path.name!r} can't be made as small as {readable_size(wanted)}",
            why=f"with {header.n_parameters:,} weights even {_MIN_BITS:g} bit for each takes {readable_size(least)}",
            hint="choose a smaller model",
        )
    return wanted


def _fitting(header: Header, hardware: Hardware, n_ctx: int | None) -> int:
    window = n_ctx or trained_context(header)
    free = hardware.memory_available
    beside = memory(header, window).needed - header.weight_bytes
    room = free - margin(free) - beside
    if room <= header.n_parameters * _MIN_BITS / 8:
        raise OutOfMemoryError(
            f"no type makes {header.path.name!r} fit into memory",
            why=f"{readable_size(free)} are free, and {window:,} tokens of context alone take {readable_size(beside)}",
            hint="ask for a smaller context: --fit --ctx 4096" if window > 4096 else "choose a smaller model",
        )
    return room

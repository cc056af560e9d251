"""Further facts of the machine, which no answer waits for: caches, NUMA nodes, kind of memory, power.

From sysfs without special rights; unreadable ones are 0, "" or None.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmrun.system import read_text

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "": 1}
_DISPLAY = "0x03"  # PCI class of graphics cards, also of those without a screen
_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_FIRST_CPU = "sys/devices/system/cpu/cpu0"


@dataclass(frozen=True, slots=True)
class Details:
    """Further facts of the machine. Sizes are in bytes."""

    l2_cache: int = 0  # of one core
    last_cache: int = 0  # the last-level cache of one core
    numa_nodes: int = 0
    memory_kind: str = ""  # e.g. "DDR5"
    on_battery: bool | None = None
    governor: str = ""  # of the processor's clock, e.g. "performance"
    throttled: int | None = None  # times that heat slowed the processor down since the start
    graphics: tuple[str, ...] = ()  # makers of the graphics cards, usable or not, e.g. ("NVIDIA",)


def probe_details(root: Path = Path("/")) -> Details:
    """Return the details of this machine.

    Args:
        root: mount point of sys; tests put samples there.
    """
    if not sys.platform.startswith("linux"):
        return Details()
    caches = dict(_caches(root))
    throttle = read_text(root / _FIRST_CPU / "thermal_throttle/core_throttle_count")
    return Details(
        l2_cache=caches.get(2, 0),
        last_cache=max(caches.values(), default=0),
        numa_nodes=len(list(_entries(root / "sys/devices/system/node", r"node\d+"))),
        memory_kind=_memory_kind(root),
        on_battery=_on_battery(root),
        governor=read_text(root / _FIRST_CPU / "cpufreq/scaling_governor"),
        throttled=int(throttle) if throttle.isdecimal() else None,
        graphics=tuple(_graphics(root)),
    )


def _entries(folder: Path, pattern: str) -> Iterator[Path]:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return
    for name in names:
        if re.fullmatch(pattern, name):
            yield folder / name


def _caches(root: Path) -> Iterator[tuple[int, int]]:
    """Yield level and size of the first core's data caches."""
    for entry in _entries(root / _FIRST_CPU / "cache", r"index\d+"):
        level, size = read_text(entry / "level"), parse_cache_size(read_text(entry / "size"))
        if level.isdecimal() and size and read_text(entry / "type") != "Instruction":
            yield int(level), size


def parse_cache_size(text: str) -> int:
    """Return the bytes of sysfs's "2048K"; 0 for other text."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(found[1]) * _UNITS[found[2]] if found else 0


def _memory_kind(root: Path) -> str:
    """Return the kind of memory from an EDAC driver, which needs no root; "" without one."""
    for controller in _entries(root / "sys/devices/system/edac/mc", r"mc\d+"):
        for module in _entries(controller, r"(dimm|rank)\d+"):
            kind = read_text(module / "dimm_mem_type")
            if kind and kind != "Unknown":
                return kind.removeprefix("Unbuffered-").removeprefix("Registered-")
    return ""


def _on_battery(root: Path) -> bool | None:
    """Return whether a battery is discharging; None without a battery."""
    supplies = list(_entries(root / "sys/class/power_supply", r".+"))
    # A mouse has a battery too, whose scope is "Device".
    batteries = [
        path for path in supplies if read_text(path / "type") == "Battery" and read_text(path / "scope") != "Device"
    ]
    mains = [read_text(path / "online") for path in supplies if read_text(path / "type") in {"Mains", "USB"}]
    if not batteries:
        return None
    if "1" in mains:
        return False
    return any(read_text(path / "status") == "Discharging" for path in batteries)


def _graphics(root: Path) -> Iterator[str]:
    """Yield the maker of each graphics card on the PCI bus, with or without a driver."""
    for device in _entries(root / "sys/bus/pci/devices", r".+"):
        maker = _MAKERS.get(read_text(device / "vendor"))
        if maker and read_text(device / "class").startswith(_DISPLAY):
            yield maker

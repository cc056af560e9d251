"""Energy used by CPUs and GPUs, from the system's counters, if this process may read them.

The counters are the whole machine's: Intel's and AMD's RAPL (/sys/class/powercap, which most systems let only root
read) and NVIDIA's NVML.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmrun.system import read_number, read_text

_POWERCAP = Path("/sys/class/powercap")
_COUNTED = ("package-", "dram")  # the zones inside a package, but its memory, are part of it

Counters = Mapping[str, float]
"""Counter -> joules since some time in the past."""


class Energy:
    """The readable counters.

    Args:
        with_gpus: count NVIDIA GPUs too.
        folder: of RAPL's counters, for tests.
    """

    def __init__(self, with_gpus: bool, folder: Path = _POWERCAP) -> None:
        self._zones = {path: wrap for path in _zones(folder) if (wrap := read_number(path / "max_energy_range_uj"))}
        self._gpus = _Nvml() if with_gpus else None

    def read(self) -> Counters:
        """Return the present values of the counters that can be read."""
        found: dict[str, float] = {}
        for zone in self._zones:
            if (counted := read_number(zone / "energy_uj")) is not None:
                found[str(zone)] = counted / 1e6
        for index, joules in enumerate(self._gpus.joules() if self._gpus else ()):
            found[f"gpu{index}"] = joules
        return found

    def since(self, before: Counters) -> float | None:
        """Return the joules used since earlier values; None if no counter can be read."""
        now = self.read()
        used = [self._difference(name, before[name], now[name]) for name in before if name in now]
        return sum(used) if used else None

    def _difference(self, name: str, before: float, now: float) -> float:
        """Return the difference of two values; a RAPL counter starts again at 0 after its largest value."""
        turn = self._zones.get(Path(name), 0) / 1e6
        return now - before if now >= before else now - before + turn


def _zones(folder: Path) -> list[Path]:
    """Return the folders of CPU packages and memory."""
    return [name.parent for name in sorted(folder.glob("*-rapl:*/name")) if read_text(name).startswith(_COUNTED)]


class _Nvml:
    """NVIDIA GPUs that count their energy (since Volta)."""

    def __init__(self) -> None:
        self._library: Any = None
        self._devices: list[ctypes.c_void_p] = []
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            count = ctypes.c_uint()
            if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
                return
            for index in range(count.value):
                device = ctypes.c_void_p()
                if not library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                    self._devices.append(device)
            self._library = library

    def joules(self) -> list[float]:
        """Return the joules of each GPU since its driver was loaded."""
        found = []
        for device in self._devices:
            counted = ctypes.c_ulonglong()
            if not self._library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(counted)):
                found.append(counted.value / 1e3)
        return found

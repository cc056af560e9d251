"""The machine of a result: its description, and what disturbed it during a measurement.

Anonymous: no host name, no user, no paths, and of the kernel only its number, so that results can be shared.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

import llmrun
from llmrun import statistics
from llmrun.lab.bench.results import BenchWarning, Machine
from llmrun.planning.hardware import Hardware, cgroup_directories, parse_statistic, probe, probe_details
from llmrun.planning.speed import Clock
from llmrun.protocol.llama_folder import llama_version
from llmrun.protocol.sizes import readable_size
from llmrun.system import read_number, read_text

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
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    if not sys.platform.startswith("linux"):
        return f"{platform.system()} {platform.release()}"
    fields = dict(re.findall(r'^(\w+)="?(.*?)"?$', read_text(root / "etc/os-release", _MOST_BYTES), re.M))
    name = fields.get("PRETTY_NAME") or fields.get("NAME") or "Linux"
    inside = any((root / mark).exists() for mark in _CONTAINERS)
    return f"{name}, in a container" if inside else name


def _kernel(root: Path) -> str:
    # Anything may follow the number, even a host's name.
    number = re.match(r"[\d.]*\d", platform.release())
    text = f"{platform.system()} {number[0] if number else ''}".strip()
    flags = re.search(r"^flags\s*:(.*)$", read_text(root / "proc/cpuinfo", 8192), re.M)
    return f"{text}, virtual machine" if flags and " hypervisor" in flags[1] else text


# ---- disturbances

_OTHERS, _OTHERS_SHARE = 0.3, 0.05  # cores, and share of all cores: whichever is more
_STEAL = 0.01  # share of the processor time
_SHORT = 10 << 20  # bytes that had to be read again
_CLOCK = 0.10  # share
_HOT = 95  # °C
_DRIFT = 0.03  # share
_CPUINFO_BYTES = 1 << 16
_PAGE = 4096


def sample_warnings(samples: Sequence[float]) -> tuple[BenchWarning, ...]:
    """Return warnings about the samples themselves: scatter, a trend, outliers.

    Args:
        samples: rates, in the order measured.
    """
    warnings = []
    interval = statistics.interval(samples)
    if interval and interval.is_noisy:
        warnings.append(BenchWarning("noisy", f"too noisy: ±{interval.half_width:.0%}"))
    drift = statistics.drift(samples)
    if abs(drift) >= _DRIFT:
        direction = "faster" if drift > 0 else "slower"
        warnings.append(BenchWarning("drift", f"{abs(drift):.0%} {direction} at the end than at the beginning"))
    odd = statistics.outliers(samples)
    # More outliers are scatter, which is reported already.
    if odd and len(odd) <= len(samples) / 4:
        which = ", ".join(str(index + 1) for index in odd)
        warnings.append(
            BenchWarning("outliers", f"repetition{'s' if len(odd) > 1 else ''} {which} far from the others")
        )
    return tuple(warnings)


@dataclass(frozen=True, slots=True)
class SystemCounters:
    """Counters that only grow; 0 where the system has none."""

    wall: float = 0.0  # seconds
    busy: float = 0.0  # seconds of processor time of all processes
    own: float = 0.0  # the part of this process and its descendants
    steal: float = 0.0  # seconds that the host gave to other guests
    throttled: int = 0  # times that a quota stopped us
    throttled_seconds: float = 0.0  # their duration
    swapped: int = 0  # bytes, in and out
    reread: int = 0  # bytes of files read again after eviction
    heat: int = 0  # times that heat slowed a core down


@dataclass(frozen=True, slots=True)
class ClockSample:
    """Clock and temperature during the work."""

    clock: float = 0.0  # of the fastest core, in Hz; 0 when unknown
    degrees: float = 0.0  # of the hottest sensor of the processor, °C; 0 when unknown


class DisturbanceMonitor:
    """A context manager that compares the counters before and after. Enter it after loading, which would disturb too.

    Args:
        root: folder with proc and sys; tests pass samples.

    Attributes:
        warnings: the disturbances; complete after the block.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = SystemCounters()
        self._samples: list[ClockSample] = []
        self.warnings: tuple[BenchWarning, ...] = ()

    def __enter__(self) -> DisturbanceMonitor:
        self._before = read(self._root)
        return self

    def sample(self) -> None:
        """Record clock and temperature; call it right after a repetition, while they still show the work."""
        self._samples.append(sample_clock(self._root))

    def __exit__(self, *error: object) -> None:
        self.warnings = disturbances(self._before, read(self._root), self._samples, os.cpu_count() or 1)


def disturbances(
    before: SystemCounters, after: SystemCounters, clock_samples: Sequence[ClockSample], cpus: int
) -> tuple[BenchWarning, ...]:
    """Return the warnings of the counters between two readings."""
    wall = max(after.wall - before.wall, 1e-3)
    warnings = []
    stolen = after.steal - before.steal  # included in busy
    others = (after.busy - before.busy - stolen - (after.own - before.own)) / wall
    if others >= max(_OTHERS, _OTHERS_SHARE * cpus):
        warnings.append(BenchWarning("load", f"other programs used {others:.1f} of {cpus} cores"))
    steal = stolen / wall / cpus
    if steal >= _STEAL:
        warnings.append(BenchWarning("steal", f"the host took away {steal:.0%} of the processor"))
    stops = after.throttled - before.throttled
    if stops > 0:
        seconds = after.throttled_seconds - before.throttled_seconds
        text = f"the container's quota stopped it {stops} times, for {seconds:.1f} s of {wall:.1f} s"
        warnings.append(BenchWarning("quota", text))
    swapped, reread = after.swapped - before.swapped, after.reread - before.reread
    if swapped >= _SHORT:
        warnings.append(BenchWarning("swapped", f"memory was swapped: {readable_size(swapped)}"))
    if reread >= _SHORT:
        text = f"memory was short: {readable_size(reread)} were read from the disk again"
        warnings.append(BenchWarning("reread", text))
    return (*warnings, *_clock_warnings(after.heat - before.heat, clock_samples))


def _clock_warnings(heat: int, clock_samples: Sequence[ClockSample]) -> list[BenchWarning]:
    warnings = []
    hottest = max((sample.degrees for sample in clock_samples), default=0.0)
    if heat > 0 or hottest >= _HOT:
        how = f" {heat} times" if heat > 0 else " down, probably"
        degrees = f": {hottest:.0f} °C" if hottest else ""
        warnings.append(BenchWarning("heat", f"heat slowed the processor{how}{degrees}"))
    clocks = [sample.clock for sample in clock_samples if sample.clock]
    if clocks and min(clocks) < (1 - _CLOCK) * max(clocks):
        first, last = (min(clocks), max(clocks)) if clocks[0] < clocks[-1] else (max(clocks), min(clocks))
        warnings.append(BenchWarning("clock", f"the clock went from {first / 1e9:.1f} to {last / 1e9:.1f} GHz"))
    return warnings


# ---- reading ---------------------------------------------------------------------------------------


def read(root: Path = Path("/")) -> SystemCounters:
    """Return the current counters."""
    now = Clock.now()
    groups = cgroup_directories(read_text(root / "proc/self/cgroup"), root / "sys/fs/cgroup")
    stopped = [read_text(group / "cpu.stat") for kind in ("", "cpu") for group in groups.get(kind, [])]
    memory = read_text(root / "proc/vmstat")
    counters = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
    return SystemCounters(
        wall=now.wall,
        busy=now.everybody,
        own=_own_seconds(),
        steal=now.steal,
        throttled=max((parse_statistic(text, "nr_throttled") for text in stopped), default=0),
        throttled_seconds=max(map(_throttled_seconds, stopped), default=0.0),
        swapped=_PAGE * (parse_statistic(memory, "pswpin") + parse_statistic(memory, "pswpout")),
        reread=_PAGE * parse_statistic(memory, "workingset_refault_file"),
        heat=int(sum(read_number(path) or 0 for path in counters)),
    )


def sample_clock(root: Path = Path("/")) -> ClockSample:
    """Return the current clock and temperature."""
    cpus = root / "sys/devices/system/cpu"
    clocks = [1e3 * (read_number(path) or 0) for path in cpus.glob("cpu[0-9]*/cpufreq/scaling_cur_freq")]
    if not clocks:
        frequencies = re.findall(
            r"^cpu MHz[^:\n]*:\s*(\d+\.?\d*)\s*$", read_text(root / "proc/cpuinfo", _CPUINFO_BYTES), re.M
        )
        clocks = [1e6 * float(text) for text in frequencies]
    zones = (root / "sys/class/thermal").glob("thermal_zone*")
    # "x86_pkg_temp", "cpu-thermal", "cpu0-thermal", "k10temp"; others are batteries and radios.
    kinds = re.compile("cpu|pkg|k10temp|soc", re.IGNORECASE)
    hot = [(read_number(zone / "temp") or 0) / 1e3 for zone in zones if kinds.search(read_text(zone / "type"))]
    return ClockSample(max(clocks, default=0.0), max(hot, default=0.0))


def _own_seconds() -> float:
    """Return the processor time of this process and its children, ended and alive."""
    times = os.times()
    total = sum(times[:4])
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            used = child.cpu_times()
            total += used.user + used.system
    return total


def _throttled_seconds(text: str) -> float:
    """Return the throttled seconds: cgroup version 2 counts microseconds, version 1 nanoseconds."""
    return parse_statistic(text, "throttled_usec") / 1e6 + parse_statistic(text, "throttled_time") / 1e9

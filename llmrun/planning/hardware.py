"""The processors, memory and GPUs that this process may use: facts, neither measured nor guessed.

Parsers are pure functions of text, so that an odd machine is a string in a test. Every first answer waits for probe();
procfs and sysfs are quick. probe_details() has what no answer waits for, and this_machine() asks an engine for GPUs.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.config import load_settings
from llmrun.errors import LlmrunError
from llmrun.planning.measured import find_measured, keep_measured
from llmrun.protocol.devices import Gpu
from llmrun.protocol.llama_folder import backend_folders
from llmrun.runner import client, launch
from llmrun.system import read_text

if TYPE_CHECKING:
    from llmrun.runner.workers import RpcWorker


# Instructions with kernels in ggml, in the spelling of /proc/cpuinfo: x86 first, then Arm.
INTERESTING_FLAGS = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni",
    "avx512f", "avx512bw", "avx512vbmi", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16",
    "neon", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme",
)  # fmt: skip

# The first processor's entry is enough; the kernel takes milliseconds to write all of a large machine's.
_CPUINFO_BYTES = 8192

# Version 1 writes 2^63 rounded down to a page for "no limit".
_NO_LIMIT_V1 = 1 << 60


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware that this process may use. Sizes are in bytes."""

    cpu_name: str  # the vendor's; "" if unknown
    cpu_flags: tuple[str, ...]  # the processor's, of INTERESTING_FLAGS, in that order
    physical_cores: int  # distinct cores; only fast ones, if the system tells
    logical_cores: int  # hardware threads
    cpu_quota: float | None  # processor time of the container, in cores; None is no limit
    memory_total: int  # of the machine, or of the container if smaller
    memory_available: int  # without swapping
    gpus: tuple[Gpu, ...] = ()  # empty unless an engine was asked
    workers: tuple[RpcWorker, ...] = ()  # RPC workers that the user named
    kv_on_use: bool = False  # an engine's KV cache takes memory when it is used, see engine/llama/zeroing.py

    @property
    def usable_cores(self) -> int:
        """Threads that can compute at the same time: the physical cores, or the quota rounded down.

        ggml's threads spin until all have finished an operation. So one thread too many uses the quota up before the
        period ends, and the kernel stops all of them.
        """
        if self.cpu_quota is None:
            return max(1, self.physical_cores)
        return max(1, min(self.physical_cores, int(self.cpu_quota)))

    @property
    def gpu_memory_free(self) -> int:
        """Free memory of all GPUs with memory of their own."""
        return sum(gpu.memory_free for gpu in self.gpus if not gpu.shared)

    @property
    def when_quiet(self) -> Hardware:
        """The machine without other programs: what fits into it does not depend on the moment."""
        gpus = tuple(replace(gpu, memory_free=gpu.memory_total) for gpu in self.gpus)
        return replace(self, memory_available=self.memory_total, gpus=gpus)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The facts that measurements depend on; the same after a reboot."""
        return {
            "cpu": self.cpu_name,
            "flags": list(self.cpu_flags),
            "cores": self.physical_cores,
            "threads": self.usable_cores,
            "memory": self.memory_total >> 30,
        }


def probe(root: Path = Path("/")) -> Hardware:
    """Return the hardware of this machine.

    Args:
        root: mount point of proc and sys; tests put samples there.
    """
    if sys.platform.startswith("linux"):
        return _probe_linux(root, _allowed_cpus())
    if sys.platform == "darwin":
        return _probe_macos()
    return _probe_elsewhere()


# ---- Linux -----------------------------------------------------------------------------------------


def _allowed_cpus() -> frozenset[int]:
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset()


def _probe_linux(root: Path, allowed: frozenset[int]) -> Hardware:
    name, flags = parse_cpuinfo(read_text(root / "proc/cpuinfo", _CPUINFO_BYTES))
    devices = root / "sys/devices"
    online = parse_cpu_list(read_text(devices / "system/cpu/online")) or allowed
    cpus = (allowed & online) or allowed or frozenset({0})
    # Hybrid x86 lists its performance cores here; nothing else has the file.
    fast = parse_cpu_list(read_text(devices / "cpu_core/cpus")) & cpus
    groups = cgroup_directories(read_text(root / "proc/self/cgroup"), root / "sys/fs/cgroup")
    total, available = parse_meminfo(read_text(root / "proc/meminfo"))
    limit, free = _cgroup_memory(groups)
    return Hardware(
        cpu_name=name or platform.machine(),
        cpu_flags=flags,
        physical_cores=_count_cores(fast or cpus, devices / "system/cpu"),
        logical_cores=len(cpus),
        cpu_quota=_cgroup_quota(groups),
        memory_total=min(total, limit) if limit is not None else total,
        memory_available=min(available, free) if free is not None else available,
        kv_on_use=True,
    )


def _count_cores(cpus: Iterable[int], directory: Path) -> int:
    """Return the number of distinct cores of hardware threads; without a topology, each thread counts as one."""
    left = set(cpus)
    cores = 0
    while left:
        cpu = left.pop()
        topology = directory / f"cpu{cpu}/topology"
        # The second is the first's name before Linux 5.3.
        left -= parse_cpu_list(read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list"))
        cores += 1
    return cores


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's list format: "0-3,8" is {0, 1, 2, 3, 8}; invalid parts are left out."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """Return name and interesting flags of the first processor in /proc/cpuinfo, of x86 or Arm."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    have = set((fields.get("flags") or fields.get("features") or "").split())
    return fields.get("model name", ""), tuple(flag for flag in INTERESTING_FLAGS if flag in have)


def parse_meminfo(text: str) -> tuple[int, int]:
    """Return MemTotal and MemAvailable of /proc/meminfo in bytes; sandboxed kernels may lack the second."""
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdecimal():
            sizes[key] = int(number[0]) * 1024
    caches = sizes.get("MemFree", 0) + sizes.get("Buffers", 0) + sizes.get("Cached", 0)
    return sizes.get("MemTotal", 0), sizes.get("MemAvailable", caches)


def cgroup_directories(text: str, root: Path) -> Mapping[str, list[Path]]:
    """Return controller -> directories of this process's control groups, from its own up to the root.

    A parent's limit holds as well, and inside a container only the root may be visible.

    Args:
        text: of /proc/self/cgroup, lines of hierarchy:controllers:path; version 2 names no controllers ("").
        root: /sys/fs/cgroup.
    """
    directories: dict[str, list[Path]] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            if controller not in {"", "cpu", "memory"}:
                continue
            # The combined mount is /sys/fs/cgroup/cpu,cpuacct; /sys/fs/cgroup/cpu is a link to it.
            mount = root / controller if controller else root
            steps = [step for step in path.split("/") if step and step != ".."]
            directories[controller] = [mount.joinpath(*steps[:depth]) for depth in range(len(steps), -1, -1)]
    return directories


def _cgroup_quota(groups: Mapping[str, list[Path]]) -> float | None:
    quotas = [parse_quota(read_text(group / "cpu.max")) for group in groups.get("", [])]
    for group in groups.get("cpu", []):
        quota, period = read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")
        quotas.append(parse_quota(f"{quota.strip()} {period.strip()}"))
    return min((quota for quota in quotas if quota is not None), default=None)


def parse_quota(text: str) -> float | None:
    """Return the cores of "QUOTA PERIOD" (microseconds); None for "max", -1, or invalid text."""
    parts = text.split()
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        return None
    return int(parts[0]) / int(parts[1])


def _cgroup_memory(groups: Mapping[str, list[Path]]) -> tuple[int | None, int | None]:
    """Return the lowest limit and the least free memory under any limit, in bytes; None without a limit."""
    limits, free = [], []
    for controller, limit_name, usage_name, prefix in (
        ("", "memory.max", "memory.current", ""),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        for group in groups.get(controller, []):
            limit = parse_limit(read_text(group / limit_name))
            if limit is None:
                continue
            usage = parse_limit(read_text(group / usage_name)) or 0
            # Cached file pages count as usage, but are given back on demand; a model read before is that.
            statistics = read_text(group / "memory.stat")
            cache = sum(parse_statistic(statistics, f"{prefix}{kind}_file") for kind in ("active", "inactive"))
            limits.append(limit)
            free.append(max(0, limit - max(0, usage - cache)))
    return min(limits, default=None), min(free, default=None)


def parse_limit(text: str) -> int | None:
    """Return the bytes in a cgroup file; None for "max", version 1's huge number, or invalid text."""
    text = text.strip()
    if not text.isdecimal() or int(text) >= _NO_LIMIT_V1:
        return None
    return int(text)


def parse_statistic(text: str, name: str) -> int:
    """Return a number of memory.stat; 0 without it."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0


# ---- elsewhere -------------------------------------------------------------------------------------

_SYSCTL_NAMES = (
    "machdep.cpu.brand_string",
    "hw.perflevel0.physicalcpu",  # Apple's performance cores; Intel Macs don't have it
    "hw.physicalcpu",
    "hw.logicalcpu",
    "hw.memsize",
)


def _probe_macos() -> Hardware:
    import psutil  # type: ignore[import-untyped,unused-ignore]  # Linux needs none of it

    names = [part for name in _SYSCTL_NAMES for part in ("-i", name)]
    ran = subprocess.run(["/usr/sbin/sysctl", *names], capture_output=True, text=True, check=False)
    return parse_sysctl(ran.stdout, platform.machine(), int(psutil.virtual_memory().available))


def parse_sysctl(text: str, machine: str, available: int) -> Hardware:
    """Return the hardware of a Mac.

    Args:
        text: output of sysctl, lines of "name: value".
        machine: platform.machine().
        available: memory in bytes, which sysctl does not know.
    """
    values = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)

    def number(name: str) -> int:
        value = values.get(name, "")
        return int(value) if value.isdecimal() else 0

    logical = number("hw.logicalcpu") or os.cpu_count() or 1
    return Hardware(
        cpu_name=values.get("machdep.cpu.brand_string", machine),
        cpu_flags=("neon",) if machine == "arm64" else (),
        physical_cores=number("hw.perflevel0.physicalcpu") or number("hw.physicalcpu") or logical,
        logical_cores=logical,
        cpu_quota=None,
        memory_total=number("hw.memsize"),
        memory_available=available,
    )


def _probe_elsewhere() -> Hardware:
    import psutil  # type: ignore[import-untyped,unused-ignore]

    memory = psutil.virtual_memory()
    logical = psutil.cpu_count(logical=True) or 1
    return Hardware(
        cpu_name=platform.processor() or platform.machine(),
        cpu_flags=(),
        physical_cores=psutil.cpu_count(logical=False) or logical,
        logical_cores=logical,
        cpu_quota=None,
        memory_total=int(memory.total),
        memory_available=int(memory.available),
    )


_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "": 1}
_DISPLAY = "0x03"  # PCI class of graphics cards, also of those without a screen
_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_FIRST_CPU = "sys/devices/system/cpu/cpu0"


@dataclass(frozen=True, slots=True)
class Details:
    """Further facts of the machine. Sizes are in bytes."""

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
    caches = _entries(root / _FIRST_CPU / "cache", r"index\d+")
    throttle = read_text(root / _FIRST_CPU / "thermal_throttle/core_throttle_count")
    return Details(
        last_cache=max((parse_cache_size(read_text(entry / "size")) for entry in caches), default=0),
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


def parse_cache_size(text: str) -> int:
    """Return the bytes of sysfs's "2048K"; 0 for other text."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * _UNITS[match[2]] if match else 0


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


_MOST_SECONDS = 60.0  # of processor time; the first start of a driver may take ten
_BACKEND = re.compile(r"(?:lib)?ggml-(\w+?)\.(?:so|dylib|dll)$")
_WITHOUT_GPU = re.compile(r"base|blas|cpu\w*|zdnn|zendnn|rpc")


def this_machine(workers: Sequence[str] = ()) -> Hardware:
    """Return the current state of the machine, with GPUs and their free memory.

    Args:
        workers: endpoints of RPC workers to ask.

    Raises:
        EngineCrashedError: llama.cpp can't be loaded.
        NetworkError: a worker can't be used.
    """
    hardware = probe()
    if workers:
        from llmrun.runner.workers import ask_all  # few name any

        hardware = replace(hardware, workers=ask_all(workers))
    folders = backend_folders()
    if not any(map(is_built_for_gpus, folders)):
        return hardware
    clues, folder = _gpu_clues(folders), load_settings().state_dir
    known = find_measured(_NO_GPU, {}, folder) if clues else None
    if known is not None and known.get("clues") == clues:
        return hardware
    hardware = _with_gpus(hardware)
    if clues and not hardware.gpus:
        with suppress(LlmrunError):  # it can't be written: the next command asks again
            keep_measured(_NO_GPU, {}, folder, {"clues": clues})
    return hardware


_NO_GPU = "no gpu"
"""Measured: the clues when an engine found no GPU. The wheel of a release has Vulkan on every machine."""
_DRIVER_PATHS = (
    "/dev", "/dev/dri", "/etc/ld.so.cache",
    "/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "~/.local/share/vulkan/icd.d",
)  # fmt: skip
_DRIVER_VARIABLES = re.compile("CUDA_|GGML_|VK_|HIP_|ROCR_|LD_LIBRARY_PATH|XDG_DATA")


def _gpu_clues(folders: Sequence[Path]) -> str:
    """Return what changes when a GPU, a driver or a backend comes: without it, an engine need not look again.

    Args:
        folders: of backends.

    Returns:
        Text; "" where the system is not Linux, and an engine has to look each time.
    """
    boot = read_text(Path("/proc/sys/kernel/random/boot_id"))
    if sys.platform != "linux" or not boot:
        return ""
    variables = {name: value for name, value in os.environ.items() if _DRIVER_VARIABLES.match(name)}
    times = {}
    for path in (*(Path(name).expanduser() for name in _DRIVER_PATHS), *folders):
        with suppress(OSError):
            times[str(path)] = path.stat().st_mtime_ns
    return json.dumps([boot, sorted(os.getgroups()), sorted(variables.items()), times])


def is_built_for_gpus(folder: Path) -> bool:
    """Return whether a folder has a library of llama.cpp that computes on GPUs."""
    matches = [_BACKEND.match(file.name) for file in folder.iterdir()] if folder.is_dir() else []
    return any(match and not _WITHOUT_GPU.fullmatch(match[1]) for match in matches)


def _with_gpus(hardware: Hardware) -> Hardware:
    """Ask this command's prestarted engine, if any: it may have begun to fill a GPU."""
    from llmrun.protocol.jobs import Empty
    from llmrun.protocol.jobs.machine import BUILD  # a start without GPUs needs neither

    is_own = not launch.has_prestarted or not client.prestarted().alive
    engine = client.EngineClient() if is_own else client.prestarted()
    with closing(engine) if is_own else nullcontext():
        return replace(hardware, gpus=engine.do(BUILD, Empty(), seconds=_MOST_SECONDS if is_own else None).gpus)

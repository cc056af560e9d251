"""The measured speed of this machine: measured once by the job `kernels`, and stored in a file.

Must not know models. Only commands that show predictions measure; `run` and `chat` never wait for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import LlmrunError
from llmrun.planning.hardware import Hardware
from llmrun.planning.measurement_cache import find, keep, machine_key
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.kernels import KERNELS, STAND_IN, MachineSpeed, MeasureKernels, Rates
from llmrun.runner.client import EngineClient

if TYPE_CHECKING:
    from llmrun.runner.workers import RpcWorker

WEEKS = 4
"""Maximum age of a measurement."""
BUSY = 0.3
"""Cores that other programs may use during a measurement: one busy core slows all of ggml's threads down."""

_FILE, _GPU_FILE = "speed.json", "gpu_speed.json"
_MOST_GPU_SECONDS = 30.0  # with shaders to compile
_MOST_SECONDS = 120.0  # 2 on an idle machine, many more on a busy one


def remembered(hardware: Hardware, folder: Path) -> MachineSpeed | None:
    """Return the stored speed of this machine; None if it is missing or too old."""
    entry = find(folder / _FILE, machine_key(hardware))
    try:
        if entry is None or not 0 <= time.time() - entry["time"] < WEEKS * 7 * 86_400:
            return None
        return from_json(MachineSpeed, entry["figures"])
    except (ValueError, TypeError, KeyError):
        return None  # edited by hand


def speed_of(hardware: Hardware, types: Collection[str], folder: Path, *, cache: int = 0) -> MachineSpeed:
    """Return this machine's speed with these types of weights, measured if unknown.

    Args:
        types: ggml's names, e.g. {"Q4_K", "Q6_K"}; unknown ones are left out.
        folder: of the stored speed.
        cache: bytes of the last-level cache; 0 if unknown.

    Raises:
        LlmrunError: llama.cpp can't be loaded, or measuring takes too long.
    """
    known = remembered(hardware, folder)
    missing = sorted({*types, STAND_IN} - set(known.types if known else ()))
    if known and not missing:
        return known
    measured = measure(hardware.usable_cores, missing, cache=cache)
    # A type that ggml can't measure is stored without rates.
    unmeasured = {kind: Rates() for kind in missing}
    speed = replace(measured, types={**(known.types if known else {}), **unmeasured, **measured.types})
    if speed.others < BUSY:
        _remember(speed, hardware, folder)
    return speed


def measure(threads: int, types: Collection[str], *, cache: int = 0) -> MachineSpeed:
    """Measure the speed: half a second, and a tenth more per type if caches are large.

    Raises:
        LlmrunError: see speed_of().
    """
    before = Clock.now()
    with closing(EngineClient()) as engine:
        measured = engine.do(KERNELS, MeasureKernels(threads, tuple(types), cache), seconds=_MOST_SECONDS)
    return replace(measured, others=before.others())


def worker_speeds(here: MachineSpeed, workers: Collection[RpcWorker], cache: int) -> tuple[MachineSpeed, ...]:
    """Measure each device of the workers over the network, for the types that are known of this machine.

    Args:
        cache: this machine's, as in speed_of(); the workers' is unknown.

    Raises:
        LlmrunError: this build has no RPC, a worker is lost, or measuring takes too long.
    """
    found = []
    with closing(EngineClient()) as engine:
        for worker in workers:
            for number in range(len(worker.devices)):
                command = MeasureKernels(0, tuple(here.types), cache, worker.endpoint, number)
                measured = engine.do(KERNELS, command, seconds=_MOST_SECONDS)
                # The graph is sent each time, so the worker reads more than it computes.
                found.append(replace(measured, operation=here.operation))
    return tuple(found)


def gpu_speeds(
    gpus: Collection[Gpu], types: Collection[str], hardware: Hardware, folder: Path
) -> tuple[MachineSpeed, ...]:
    """Return the speed of each GPU with these types of weights, measured if unknown.

    Args:
        folder: of the stored speeds.

    Raises:
        LlmrunError: measuring fails or takes too long, or did so before.
    """
    found = []
    for gpu in gpus:
        key = {**machine_key(hardware), "gpu": [gpu.name, gpu.description], "types": sorted({*types, STAND_IN})}
        entry = find(folder / _GPU_FILE, key)
        if entry is None:
            command = MeasureKernels(hardware.usable_cores, tuple(key["types"]), gpu=gpu.name)
            entry = {"figures": None}
            try:
                with closing(EngineClient()) as engine:
                    entry = {"figures": as_dict(engine.do(KERNELS, command, seconds=_MOST_GPU_SECONDS))}
            finally:
                with suppress(LlmrunError):  # the next command measures again
                    keep(folder / _GPU_FILE, key, entry)
        if entry.get("figures") is None:
            raise LlmrunError(f"measuring {gpu.name} failed before")
        found.append(from_json(MachineSpeed, entry["figures"]))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Clock:
    """Counters of wall time and processor time, in seconds."""

    wall: float
    everybody: float  # processor time of all programs
    children: float  # of ended child processes

    @classmethod
    def now(cls) -> Clock:
        """Read the counters."""
        import psutil  # type: ignore[import-untyped,unused-ignore]

        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Guest time is part of user time, and not every system counts it.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = os.times()
        return cls(time.monotonic(), total - idle, own.children_user + own.children_system)

    def others(self) -> float:
        """Return the cores that other programs used since then, without child processes."""
        now = Clock.now()
        used = (now.everybody - self.everybody) - (now.children - self.children)
        return max(used, 0.0) / max(now.wall - self.wall, 1e-3)


def _remember(speed: MachineSpeed, hardware: Hardware, folder: Path) -> None:
    with suppress(LlmrunError):  # the next command measures again
        keep(folder / _FILE, machine_key(hardware), {"time": time.time(), "figures": as_dict(speed)})

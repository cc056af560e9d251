"""The speed of this machine when it is quiet: measured by the job `kernels`, and stored in a file.

Every prediction comes from the stored figures, so that two commands agree. Beside other programs, processor time is
measured instead of time: an estimate, marked as one, until the machine is quiet.
Only commands that show predictions measure; `run` and `chat` never wait for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from llmrun.errors import LlmrunError
from llmrun.planning.hardware import Hardware, probe_details
from llmrun.planning.measured import find_measured, keep_measured
from llmrun.planning.measurements import machine_key
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.machine import KERNELS, STAND_IN, MachineSpeed, MeasureKernels, Rates
from llmrun.runner.client import EngineClient

WEEKS = 4
"""Age of a measurement from which on the machine is measured again, when it is quiet."""
BUSY = 0.3
"""Cores that other programs may use during a measurement: one busy core slows all of ggml's threads down."""

_LOOK_SECONDS = 0.1  # to see what other programs use
_MOST_GPU_SECONDS = 30.0  # of processor time, with shaders to compile
_MOST_SECONDS = 120.0  # of processor time; it takes 2


def remembered(hardware: Hardware, folder: Path) -> MachineSpeed | None:
    """Return the stored speed of this machine; None if it is missing."""
    return _stored(hardware, folder)[0]


def _stored(hardware: Hardware, folder: Path) -> tuple[MachineSpeed | None, float]:
    """Return the stored speed, and its age in seconds, infinite if a clock was wrong."""
    entry = find_measured("speed", machine_key(hardware), folder)
    try:
        if entry is None:
            return None, 0.0
        age, figures = time.time() - entry["time"], from_json(MachineSpeed, entry["figures"])
    except (ValueError, TypeError, KeyError):
        return None, 0.0  # edited by hand
    if figures.others >= BUSY and not figures.is_estimated:  # llmrun stored these once, many times too low
        return None, 0.0
    return figures, age if age >= 0 else float("inf")


def speed_of(
    hardware: Hardware,
    types: Collection[str],
    folder: Path,
    on_progress: Callable[[float], None] = lambda share: None,
) -> MachineSpeed:
    """Return this machine's speed with these types of weights.

    It is measured if it is unknown, and if it is old or an estimate and the machine is quiet.

    Args:
        types: ggml's names, e.g. {"Q4_K", "Q6_K"}; unknown ones are left out.
        folder: of the stored speed.
        on_progress: called during a measurement, which takes some seconds, with the part that is done.

    Raises:
        LlmrunError: llama.cpp can't be loaded.
    """
    stored, age = _stored(hardware, folder)
    is_due = stored is not None and (stored.is_estimated or age >= WEEKS * 7 * 86_400) and other_programs() < BUSY
    missing = sorted({*types, STAND_IN} - set(stored.types if stored and not is_due else ()))
    if stored and not missing:
        return stored
    wanted = sorted({*missing, STAND_IN})  # tells how much slower than the stored figures this moment is
    measured = measure(hardware.usable_cores, wanted, cache=probe_details().last_cache, on_progress=on_progress)
    # A type that ggml can't measure is stored without rates.
    rates = {**{type_name: Rates() for type_name in missing}, **measured.types}
    if stored is None or (is_due and not measured.is_estimated):
        speed = replace(measured, types={**_as_known(stored.types if stored else {}, measured), **rates})
    else:
        speed = replace(stored, types={**_as_known(rates, stored), **stored.types})
    if speed.is_estimated or not measured.is_estimated:
        _remember(speed, hardware, folder)
    return speed


def other_programs() -> float:
    """Return the cores that other programs use at the moment."""
    before = Clock.now()
    time.sleep(_LOOK_SECONDS)
    return before.others()


def _as_known(rates: Mapping[str, Rates], stored: MachineSpeed) -> dict[str, Rates]:
    """Return the rates of types as they would have been at the stored measurement, by the stand-in's rates in both."""
    now, before = rates.get(STAND_IN, Rates()), stored.types.get(STAND_IN, Rates())
    decode = before.decode[-1][1] / now.decode[-1][1] if now.decode and before.decode else 1.0
    prefill = before.prefill / now.prefill if now.prefill and before.prefill else 1.0
    return {
        type_name: replace(
            rates_then,
            decode=tuple((size, rate * decode) for size, rate in rates_then.decode),
            prefill=rates_then.prefill * prefill,
        )
        for type_name, rates_then in rates.items()
    }


def measure(
    threads: int, types: Collection[str], *, cache: int = 0, on_progress: Callable[[float], None] = lambda share: None
) -> MachineSpeed:
    """Measure the speed: half a second, and a tenth more per type if caches are large.

    A busy machine is measured by processor time, also where other programs begin meanwhile.

    Args:
        cache: bytes of the last-level cache; 0 if unknown.

    Raises:
        LlmrunError: see speed_of().
    """
    command = MeasureKernels(threads, tuple(types), cache, is_shared=other_programs() >= BUSY)
    while True:
        before = Clock.now()
        with closing(EngineClient()) as engine:
            on_progress(0.0)  # the engine starts
            measured = engine.do(KERNELS, command, on_progress, seconds=_MOST_SECONDS)
        others = before.others()
        if command.is_shared or others < BUSY:
            return replace(measured, others=others, is_estimated=command.is_shared)
        command = replace(command, is_shared=True)  # other programs have begun meanwhile


def gpu_speeds(
    gpus: Collection[Gpu], types: Collection[str], hardware: Hardware, folder: Path
) -> tuple[MachineSpeed, ...]:
    """Return the speed of each GPU with these types of weights, measured if unknown.

    Args:
        folder: of the stored speeds.

    Raises:
        LlmrunError: measuring fails or takes too long, or did so before.
    """
    speeds = []
    for gpu in gpus:
        key = {**machine_key(hardware), "gpu": [gpu.name, gpu.description], "types": sorted({*types, STAND_IN})}
        entry = find_measured("gpu speed", key, folder)
        if entry is None:
            command = MeasureKernels(hardware.usable_cores, tuple(key["types"]), gpu=gpu.name)
            entry = {"figures": None}
            try:
                with closing(EngineClient()) as engine:
                    entry = {"figures": as_dict(engine.do(KERNELS, command, seconds=_MOST_GPU_SECONDS))}
            finally:
                with suppress(LlmrunError):  # the next command measures again
                    keep_measured("gpu speed", key, folder, entry)
        if entry.get("figures") is None:
            raise LlmrunError(f"measuring {gpu.name} failed before")
        speeds.append(from_json(MachineSpeed, entry["figures"]))
    return tuple(speeds)


@dataclass(frozen=True, slots=True)
class Clock:
    """Counters of wall time and processor time, in seconds."""

    wall: float
    everybody: float  # processor time of all programs
    children: float  # of ended child processes
    steal: float = 0.0  # part of everybody's that the host gave to other guests

    @classmethod
    def now(cls) -> Clock:
        """Read the counters."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Guest time is part of user time, and not every system counts it.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        process = os.times()
        children = process.children_user + process.children_system
        return cls(time.monotonic(), total - idle, children, getattr(times, "steal", 0.0))

    def others(self) -> float:
        """Return the cores that other programs used since then, without child processes."""
        now = Clock.now()
        used = (now.everybody - self.everybody) - (now.children - self.children)
        return max(used, 0.0) / max(now.wall - self.wall, 1e-3)


def _remember(speed: MachineSpeed, hardware: Hardware, folder: Path) -> None:
    with suppress(LlmrunError):  # the next command measures again
        keep_measured("speed", machine_key(hardware), folder, {"time": time.time(), "figures": as_dict(speed)})

"""How fast this machine computes, as measured: asked from the engine once, and remembered on this disk.

Owns the file of the figures, and when they are out of date; must not know models. The measuring is done
by the job `kernels`, in an engine of its own. Only commands that show predictions ask for it: `run` and `chat` never
wait for a measurement.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import LlmrunError
from llmrun.planning.hardware import Hardware
from llmrun.protocol.codec import as_dict, from_json, load_json
from llmrun.protocol.jobs.kernels import KERNELS, STAND_IN, MachineSpeed, MeasureKernels, Rates
from llmrun.runner.client import EngineClient
from llmrun.storage import write_whole

if TYPE_CHECKING:
    from llmrun.runner.workers import RpcWorker

WEEKS = 4
"""After that a measurement is made again."""
BUSY = 0.3
"""Cores. ggml's threads wait for each other, so a busy one slows all of them down."""

_FILE = "speed.json"
_MOST_BYTES = 1 << 20
_MOST_SECONDS = 120.0  # an idle machine takes 2, a busy one many times as long


def remembered(hardware: Hardware, folder: Path) -> MachineSpeed | None:
    """What was measured on this machine before, None when there is nothing or it is too old."""
    try:
        with (folder / _FILE).open("rb") as file:
            data = load_json(file.read(_MOST_BYTES))
        age = time.time() - data["time"]
        if data["machine"] != hardware.fingerprint or not 0 <= age < WEEKS * 7 * 86_400:
            return None
        return from_json(MachineSpeed, data["figures"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def speed_of(hardware: Hardware, types: Collection[str], folder: Path, *, cache: int = 0) -> MachineSpeed:
    """This machine's speed with these types of weights, measured where it isn't known yet.

    Args:
        types: ggml's names, e.g. {"Q4_K", "Q6_K"}; those it does not know are left out.
        folder: where it is remembered.
        cache: bytes of the last-level cache; 0 when that isn't known.

    Raises:
        LlmrunError: llama.cpp can't be loaded, or measuring takes too long.
    """
    known = remembered(hardware, folder)
    missing = sorted({*types, STAND_IN} - set(known.types if known else ()))
    if known and not missing:
        return known
    measured = measure(hardware.usable_cores, missing, cache=cache)
    # A type that ggml can't measure is remembered as such.
    unmeasured = {kind: Rates() for kind in missing}
    speed = replace(measured, types={**(known.types if known else {}), **unmeasured, **measured.types})
    if speed.others < BUSY:
        _remember(speed, hardware, folder)
    return speed


def measure(threads: int, types: Collection[str], *, cache: int = 0) -> MachineSpeed:
    """Measure now; takes half a second, and for each type a tenth more where caches are large.

    Raises:
        LlmrunError: see speed_of().
    """
    before = Clock.now()
    with closing(EngineClient()) as engine:
        measured = engine.do(KERNELS, MeasureKernels(threads, tuple(types), cache), seconds=_MOST_SECONDS)
    return replace(measured, others=before.others())


def worker_speeds(here: MachineSpeed, workers: Collection[RpcWorker], cache: int) -> tuple[MachineSpeed, ...]:
    """The same of each device of the workers, measured now over the network; for the types that are known here.

    Args:
        cache: as in speed_of(), of this machine: theirs is not known.

    Raises:
        LlmrunError: this build has no RPC, a worker is lost, or measuring takes too long.
    """
    found = []
    with closing(EngineClient()) as engine:
        for worker in workers:
            for number in range(len(worker.devices)):
                command = MeasureKernels(0, tuple(here.types), cache, worker.endpoint, number)
                measured = engine.do(KERNELS, command, seconds=_MOST_SECONDS)
                # Of a graph that comes anew each time, the worker would read more than compute.
                found.append(replace(measured, operation=here.operation))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Clock:
    """Who used the processor: seconds since some time in the past.

    Attributes:
        wall: that have passed.
        everybody: processor time of all programs.
        children: of that, of our children that have ended.
    """

    wall: float
    everybody: float
    children: float

    @classmethod
    def now(cls) -> Clock:
        """As of now."""
        import psutil  # type: ignore[import-untyped,unused-ignore]

        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # guest time is part of user time, and not every system counts it
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = os.times()
        return cls(time.monotonic(), total - idle, own.children_user + own.children_system)

    def others(self) -> float:
        """Cores that were used since then, but not by children of ours."""
        now = Clock.now()
        used = (now.everybody - self.everybody) - (now.children - self.children)
        return max(used, 0.0) / max(now.wall - self.wall, 1e-3)


def _remember(speed: MachineSpeed, hardware: Hardware, folder: Path) -> None:
    data = {"machine": hardware.fingerprint, "time": time.time(), "figures": as_dict(speed)}
    with suppress(LlmrunError):  # then it is measured again next time
        write_whole(folder / _FILE, json.dumps(data), makes_folder=True)

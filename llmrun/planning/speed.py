"""How fast this machine computes, as measured: asked from the engine once, and remembered on this disk.

Owns the figures, their file and when they are out of date; must not know models. The measuring is done by
engine/jobs/machine/kernels.py in a process of its own, with ggml's kernels. Only commands that show predictions ask
for it: `run` and `chat` never wait for a measurement.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmrun.errors import LlmrunError
from llmrun.planning.hardware import Gpu, Hardware
from llmrun.planning.inquiry import ask
from llmrun.storage import write_whole

WEEKS = 4
"""After that a measurement is made again."""
BUSY = 0.3
"""Cores. ggml's threads wait for each other, so a busy one slows all of them down."""

_FILE = "speed.json"
_UNKNOWN_TYPE = "Q4_K"  # stands in for a type that can't be measured
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one type of weights.

    Attributes:
        decode: (bytes, bytes/s) of matrices times one token, the smaller first; empty when it can't be measured.
        prefill: multiply-adds/s of a matrix times many tokens.
    """

    decode: tuple[tuple[float, float], ...] = ()
    prefill: float = 0.0

    def at(self, size: float) -> float:
        """Bytes/s in decode when all matrices of the model have that size: caches are faster than memory."""
        (small, fast), (large, slow) = self.decode[0], self.decode[-1]
        if size <= small or small == large:
            return fast
        share = min(math.log(size / small) / math.log(large / small), 1.0)
        return fast + share * (slow - fast)


@dataclass(frozen=True, slots=True)
class Speed:
    """Figures of one machine with one number of threads.

    Attributes:
        read: bytes/s that all threads read from memory.
        operation: seconds of a small operation, mostly for the threads to meet.
        looks: KV type -> head length -> seconds for a query head to look at one position, in decode.
        prefill_looks: the same in prefill.
        types: type -> its rates.
        gpus: that ggml can compute on.
        others: cores that other programs used while this was measured; from BUSY on it is not remembered.
    """

    read: float
    operation: float
    looks: Mapping[str, Mapping[int, float]]
    prefill_looks: Mapping[str, Mapping[int, float]]
    types: Mapping[str, Rates]
    gpus: tuple[Gpu, ...] = ()
    others: float = 0.0

    def decode(self, kind: str, size: float) -> float:
        """Bytes/s of this type's matrices in decode, in a model of that size."""
        rates = self._rates(kind)
        return rates.at(size) if rates.decode else self.read

    def prefill(self, kind: str) -> float:
        """Multiply-adds/s of this type's matrices in prefill."""
        return self._rates(kind).prefill or self.read

    def _rates(self, kind: str) -> Rates:
        rates = self.types.get(kind, Rates())
        return rates if rates.decode else self.types.get(_UNKNOWN_TYPE, Rates())

    def attention(self, kv_type: str, head_length: int, *, prefill: bool = False) -> float:
        """Seconds for a query head to look at one position; between measured lengths in proportion to the nearest."""
        table = (self.prefill_looks if prefill else self.looks).get(kv_type.upper(), {})
        if not table:
            return 0.0
        nearest = min(table, key=lambda length: abs(length - head_length))
        return table[nearest] * head_length / nearest


def remembered(hardware: Hardware, folder: Path) -> Speed | None:
    """What was measured on this machine before, None when there is nothing or it is too old."""
    try:
        with (folder / _FILE).open("rb") as file:
            data = json.loads(file.read(_MOST_BYTES))
        age = time.time() - data["time"]
        if data["machine"] != fingerprint(hardware) or not 0 <= age < WEEKS * 7 * 86_400:
            return None
        return _speed(data["figures"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def speed_of(hardware: Hardware, types: Collection[str], folder: Path, *, cache: int = 0) -> Speed:
    """This machine's speed with these types of weights, measured where it isn't known yet.

    Args:
        types: ggml's names, e.g. {"Q4_K", "Q6_K"}; those it does not know are left out.
        folder: where it is remembered.
        cache: bytes of the last-level cache; 0 when that isn't known.

    Raises:
        LlmrunError: llama.cpp can't be loaded, or measuring takes too long.
    """
    known = remembered(hardware, folder)
    missing = sorted({*types, _UNKNOWN_TYPE} - set(known.types if known else ()))
    if known and not missing:
        return known
    measured = measure(hardware.usable_cores, missing, cache=cache)
    # A type that ggml can't measure is remembered as such.
    unmeasured = {kind: Rates() for kind in missing}
    speed = replace(measured, types={**(known.types if known else {}), **unmeasured, **measured.types})
    if speed.others < BUSY:
        _remember(speed, hardware, folder)
    return speed


def measure(threads: int, types: Collection[str], *, cache: int = 0) -> Speed:
    """Measure now; takes half a second, and for each type a tenth more where caches are large.

    Raises:
        LlmrunError: see speed_of().
    """
    before = Clock.now()
    answer = ask("kernels", str(threads), str(cache), *types)
    try:
        return replace(_speed(answer), others=before.others())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LlmrunError(
            "this machine's speed can't be measured", why=f"the engine sent garbage ({error!r})"
        ) from error


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


def fingerprint(hardware: Hardware) -> dict[str, Any]:
    """What a measurement depends on; the same after a reboot."""
    return {
        "cpu": hardware.cpu_name,
        "flags": list(hardware.cpu_flags),
        "cores": hardware.physical_cores,
        "threads": hardware.usable_cores,
        "memory": hardware.memory_total >> 30,
    }


def _remember(speed: Speed, hardware: Hardware, folder: Path) -> None:
    data = {"machine": fingerprint(hardware), "time": time.time(), "figures": _plain(speed)}
    with suppress(LlmrunError):  # then it is measured again next time
        write_whole(folder / _FILE, json.dumps(data), makes_folder=True)


def _plain(speed: Speed) -> dict[str, Any]:
    return {
        "read": speed.read,
        "operation": speed.operation,
        "attention": speed.looks,
        "attention_prefill": speed.prefill_looks,
        "types": {
            kind: {"decode": dict(rates.decode), "prefill": rates.prefill} for kind, rates in speed.types.items()
        },
        "gpus": [asdict(gpu) for gpu in speed.gpus],
    }


def _speed(data: Mapping[str, Any]) -> Speed:
    """The engine's figures; what is no number is refused.

    Raises:
        KeyError, TypeError, ValueError: they are damaged.
    """

    def looks(name: str) -> dict[str, dict[int, float]]:
        return {kv: {int(length): float(t) for length, t in table.items()} for kv, table in data[name].items()}

    return Speed(
        float(data["read"]),
        float(data["operation"]),
        looks("attention"),
        looks("attention_prefill"),
        {kind: _rates(rates) for kind, rates in data["types"].items()},
        tuple(Gpu(**gpu) for gpu in data["gpus"]),
    )


def _rates(data: Mapping[str, Any]) -> Rates:
    if not data:
        return Rates()
    decode = sorted((float(size), float(rate)) for size, rate in data["decode"].items())
    return Rates(tuple(decode), float(data["prefill"]))

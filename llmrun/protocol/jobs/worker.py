"""The job `worker`: serve this machine's devices to engines of other machines, until the process ends."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class ServeDevices:
    """Serve devices."""

    endpoint: str  # "ADDRESS:PORT" to listen on, an IPv4 address
    threads: int  # of the processor
    cache: str = ""  # folder that caches weights, so that they need not be sent again; "" for none


@dataclass(frozen=True, slots=True)
class ServedDevices:
    """The served devices, sent just before the worker listens."""

    devices: tuple[Gpu, ...]  # GPUs, or the processor if there are none
    build: str  # ggml's version and commit


WORKER = JobKind("worker", ServeDevices, ServedDevices, Empty)

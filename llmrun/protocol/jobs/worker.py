"""The job of a worker: to serve this machine's devices to engines of other machines, until the process ends."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class ServeDevices:
    """Serve.

    Attributes:
        endpoint: "ADDRESS:PORT" to listen at, an IPv4 address.
        threads: that compute, where a processor does.
        cache: folder that keeps weights, so that they need not be sent again; "" for none.
    """

    endpoint: str
    threads: int
    cache: str = ""


@dataclass(frozen=True, slots=True)
class ServedDevices:
    """What is served, told just before it begins.

    Attributes:
        devices: GPUs, or the processor where there are none.
        build: ggml's version and commit.
    """

    devices: tuple[Gpu, ...]
    build: str


WORKER = JobKind("worker", ServeDevices, ServedDevices, Empty)

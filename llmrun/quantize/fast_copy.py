"""A copy of a quantized model that reads prompts faster, because ggml has better kernels for its type on this machine.

The speeds are predicted from measured kernels. Must not know files or terminals.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llmrun.gguf.header import Header
from llmrun.planning.hardware import Hardware
from llmrun.planning.predict import predict, work_of
from llmrun.protocol.jobs.machine import MachineSpeed
from llmrun.quantize.types import COPY_TYPE, slow_prompts, tensor_bytes

_WORTHWHILE = 1.3  # ratio of prefill rates


class FastCopy(NamedTuple):
    """The copy, and its speed relative to the original."""

    type: str
    n_bytes: int  # of its weights
    prefill: float  # ratio of prefill rates
    decode: float  # ratio of decode rates


def has_slow_prompts(header: Header, hardware: Hardware) -> bool:
    """Return whether most weights have a type whose prompts are slow on this processor."""
    return not hardware.gpus and bool(slow_prompts(next(iter(header.bytes_per_type), ""), hardware.cpu_flags))


def fast_copy(header: Header, speed: MachineSpeed) -> FastCopy | None:
    """Return the copy in COPY_TYPE; None if it gains little by the measured kernels."""
    tensors = tuple(
        replace(tensor, type=COPY_TYPE, n_bytes=tensor_bytes(tensor, COPY_TYPE)) if len(tensor.shape) > 1 else tensor
        for tensor in header.tensors
    )
    before, after = (predict(work_of(each), speed) for each in (header, replace(header, tensors=tensors)))
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    found = FastCopy(
        COPY_TYPE, n_bytes, after.prefill_rate / before.prefill_rate, after.decode_rate / before.decode_rate
    )
    return found if found.prefill >= _WORTHWHILE else None

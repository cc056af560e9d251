"""The jobs about the machine: `build`, `limits`, `kernels` and `worker`.

`limits` measures with native/limits.cpp. `kernels` measures with ggml's own kernels on a model's number of threads: a
processor's data sheet says little about the kernel that a type uses. `worker` is ggml's RPC server in this process.
compare_variants() measures beside a loaded model, while nobody waits for an answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from llmrun import _native
from llmrun.engine.llama.devices import (
    backends,
    build,
    devices,
    features,
    gpus,
    has_rpc,
    memory_of,
    require_rpc,
    serve,
    served,
    supports_offload,
)
from llmrun.engine.llama.ggml import Operations
from llmrun.engine.llama.library import cpu_variant, distinct_variants, kernels, start
from llmrun.errors import LlmrunError, OutOfMemoryError
from llmrun.gguf.types import TENSOR_TYPES, WEIGHT_TYPES
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.machine import (
    LONG_ROW,
    SHORT_ROW,
    Build,
    MachineSpeed,
    MeasuredLimits,
    MeasureKernels,
    MeasureLimits,
    Rates,
    ServedDevices,
    ServeDevices,
)
from llmrun.protocol.speculation import VariantTime

_NUMBERS = ("int8", "half", "single")  # multiplied to measure limits

HEAD_LENGTHS = (64, 96, 128, 256)  # Measured head lengths; kernels are much faster for some of them

_LARGE = (64 << 20, 384 << 20)  # minimum and maximum bytes of the matrices for decode
_MAX_MATRICES = 600
_CACHES = 1.5  # size of the matrices for decode in last-level caches, so that they are read from memory
_SMALL = 2 << 20  # bytes of a matrix for prefill, which computes more than it reads
_FAST = 20e9  # bytes/s of that matrix, beyond processors
_PROMPT = 128  # tokens of a prefill
_POSITIONS = 1024  # of the KV cache: few enough for a CPU cache, because memory reads are estimated separately
_HEADS = 16
_KV_HEADS = 4
_OPERATIONS = 300
# Seconds that threads wait for each other in an operation, and in a product of matrices, which has several barriers:
# the differences between one and two threads on two idle cores of a Xeon.
_WAIT, _WAIT_PRODUCT = 0.3e-6, 2.5e-6
_SECONDS = 0.05  # in total, after which a measurement is not repeated
_REPEATS = 25  # maximum, after one that warms up
_VARIANT_ROUNDS = 3
_VARIANT_BYTES = 32 << 20  # of the matrices for decode, so that an answer that interrupts waits for little
_MAX_SPREAD = 1.15  # ratio of a variant's two best measurements, beyond which other programs disturbed them


def parse_system_info(text: str) -> dict[str, tuple[str, ...]]:
    """Parse llama_print_system_info's "CPU : AVX2 = 1 | FMA = 1 | CUDA : ARCHS = 500 | ": backend -> features."""
    features: dict[str, tuple[str, ...]] = {}
    backend = ""
    for part in text.split("|"):
        name, _, setting = part.rpartition(" : ")
        backend = name.strip() or backend
        feature = re.match(r"\s*(\w+) = (.+)", setting)
        if feature and feature[2].strip() != "0":
            features[backend] = (*features.get(backend, ()), feature[1])
    return features


def run_build(command: Empty, report: Callable[[Empty], None], flag: _native.CancelFlag) -> Build:
    start()
    return Build(
        parse_system_info(features()),
        gpus(),
        supports_offload(),
        has_rpc(),
        tuple(backends()),
        cpu_variant(),
        *kernels(),
    )


def run_cpu_variants(command: Empty, report: Callable[[Empty], None], flag: _native.CancelFlag) -> tuple[str, ...]:
    """Load each variant, which takes time: build, which every plan with a GPU asks for, does without."""
    start()
    return tuple(distinct_variants())


def run_limits(command: MeasureLimits, report: Callable[[Empty], None], flag: _native.CancelFlag) -> MeasuredLimits:
    """Measure.

    Raises:
        OutOfMemoryError: there is no memory for the buffer.
    """
    try:
        read = _native.read_rate(command.n_bytes, command.threads, command.seconds)
    except MemoryError:
        raise OutOfMemoryError(f"there is no memory for a buffer of {command.n_bytes:,} bytes") from None
    share = command.seconds / len(_NUMBERS)
    return MeasuredLimits(read, *(_native.multiply_add_rate(name, command.threads, share) for name in _NUMBERS))


def run_worker(command: ServeDevices, report: Callable[[ServedDevices], None], flag: _native.CancelFlag) -> Empty:
    """Serve until the process ends.

    Raises:
        LlmrunError: the worker can't listen there, or this build has no RPC.
    """
    start()
    require_rpc()
    chosen = served()
    commit, version = build()
    report(ServedDevices(tuple(memory_of(device) for device in chosen), f"{version} ({commit})"))
    serve(command.endpoint, command.threads, command.cache, chosen)
    raise LlmrunError(f"the worker can no longer listen on {command.endpoint}")


def run_kernels(command: MeasureKernels, report: Callable[[float], None], flag: _native.CancelFlag) -> MachineSpeed:
    """Measure; with is_shared each figure is that of one thread, times the number of threads, but at most what all
    threads read of the memory when they run at the same time."""
    _keep_memory()
    start()
    ggml = Operations(command.threads, _device(command), is_shared=command.is_shared)
    # Two sizes of matrices for decode if a cache is so large that it may hold a small model.
    sizes = sorted({_LARGE[0], min(max(int(_CACHES * command.cache), _LARGE[0]), _LARGE[1])})
    names = [name for name in command.types if name in WEIGHT_TYPES]
    n_parts = 1 + len(names)  # the first is all but the types
    report(0.0)
    read = _read_at_once(command.threads, sizes[-1]) if command.is_shared else _read(ggml, sizes[-1])
    operation = _operation(ggml)
    attention_seconds, prefill_attention_seconds = (
        {name: _attention(ggml, TENSOR_TYPES[name].number, tokens) for name in ("F16", "Q8_0")}
        for tokens in (1, _PROMPT)
    )
    types = {}
    for done, name in enumerate(names, 1):
        report(done / n_parts)
        types[name] = _rates(ggml, TENSOR_TYPES[name].number, sizes)
        if command.is_shared and types[name].decode:
            *cached, (size, rate) = types[name].decode
            types[name] = replace(types[name], decode=(*cached, (size, min(rate, read))))
    return MachineSpeed(
        read=read,
        operation=operation,
        attention_seconds=attention_seconds,
        prefill_attention_seconds=prefill_attention_seconds,
        types=types,
    )


def _read(ggml: Operations, n_bytes: int) -> float:
    return _one_token(ggml, TENSOR_TYPES["F32"].number, ggml.plain, n_bytes)


def _read_at_once(threads: int, n_bytes: int) -> float:
    """Return the bytes/s that threads read when each has a part of the bytes, by the processor time of each."""
    operations = [Operations(1, is_shared=True) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(_read, operations, [n_bytes // threads] * threads))


def compare_variants(types: Sequence[str], threads: int, is_interrupted: Callable[[], bool]) -> tuple[VariantTime, ...]:
    """Measure the processor's variants in turns.

    Args:
        types: of weights, ggml's names.
        is_interrupted: checked before each measurement, which takes a tenth of a second.

    Returns:
        The times of each type, ggml's choice first, up to the first type that was interrupted or disturbed.
    """
    operations = {name: Operations(threads, device) for name, device in distinct_variants().items()}
    times: list[VariantTime] = []
    for type_name in types:
        rates: dict[str, list[tuple[float, float]]] = {variant: [] for variant in operations}
        for number in range(_VARIANT_ROUNDS):
            for variant in operations if number % 2 else reversed(operations):
                if is_interrupted():
                    return tuple(times)
                rates[variant].append(_variant_rates(operations[variant], TENSOR_TYPES[type_name].number))
        for variant, rounds in rates.items():
            decode, prefill = (sorted(values) for values in zip(*rounds, strict=True))
            is_disturbed = any(best > _MAX_SPREAD * second for *_, second, best in (decode, prefill))
            if is_disturbed or not (decode[0] and prefill[0]):
                return tuple(time for time in times if time.type != type_name)
            times.append(VariantTime(type_name, variant, 1 / decode[-1], 1 / prefill[-1]))
    return tuple(times)


def _variant_rates(ggml: Operations, number: int) -> tuple[float, float]:
    """Measure bytes/s of one token, and of one token in a prompt; zeros if the type can't be measured."""
    for buffer in (*ggml.repacking, ggml.plain):
        if decode := _one_token(ggml, number, buffer, _VARIANT_BYTES):
            shape = (LONG_ROW, _rows(_SMALL, ggml.row_size(number, LONG_ROW)))
            return decode, _PROMPT * _products(ggml, number, buffer, shape, tokens=_PROMPT)
    return 0.0, 0.0


def _device(command: MeasureKernels) -> int:
    """Return ggml's pointer to the device to measure; 0 for this machine's processor."""
    return next((device.pointer for device in devices() if device.name == command.gpu), 0)


def _rates(ggml: Operations, number: int, sizes: Sequence[int]) -> Rates:
    for buffer in (*ggml.repacking, ggml.plain):
        decode = tuple((float(size), _one_token(ggml, number, buffer, size)) for size in sizes)
        if all(rate for _, rate in decode):
            row = ggml.row_size(number, LONG_ROW)
            prefill = _products(ggml, number, buffer, (LONG_ROW, _rows(_SMALL, row)), tokens=_PROMPT)
            if prefill > _FAST:  # a GPU needs more work at a time
                prefill = _products(ggml, number, buffer, (LONG_ROW, _rows(_LARGE[0], row)), tokens=_PROMPT)
            short = _one_token(ggml, number, buffer, sizes[0], SHORT_ROW)
            return Rates(decode, prefill * _PROMPT / (row / LONG_ROW), decode[0][1] / short if short else 1.0)
    return Rates()


def _one_token(ggml: Operations, number: int, buffer: int, n_bytes: int, columns: int = LONG_ROW) -> float:
    """Measure bytes/s of n_bytes of square matrices times one token, one after the other.

    Threads synchronize before and after each, as in a model: with repacked matrices of 512 x 512, two threads take
    three times as long as for a single matrix of the total size. A GPU gets the single one.
    """
    row = ggml.row_size(number, columns)
    if ggml.is_gpu:
        return _products(ggml, number, buffer, (columns, _rows(n_bytes, row)))
    return _products(ggml, number, buffer, (columns, columns), count=min(n_bytes // (columns * row), _MAX_MATRICES))


def _rows(n_bytes: int, row: int) -> int:
    return n_bytes // row // 256 * 256


def _products(
    ggml: Operations, number: int, buffer: int, shape: tuple[int, int], *, tokens: int = 1, count: int = 1
) -> float:
    """Measure bytes/s of a chain of `count` products: the first matrix times the tokens, each other times the result.

    Returns 0 if the buffer does not support the type.

    Args:
        shape: elements of a row, and rows; equal if count is more than 1.
    """
    columns, rows = shape
    with ggml.tensors() as weights, ggml.tensors() as values:
        result = ggml.tensor(values, TENSOR_TYPES["F32"].number, columns, tokens)
        for _ in range(count):
            result = ggml.mul_mat(values, ggml.tensor(weights, number, columns, rows), result)
        with ggml.memory(weights, buffer) as is_allocated:
            if not is_allocated or not ggml.supports(result):
                return 0.0
            with ggml.memory(values, ggml.plain):
                seconds = ggml.seconds(result, _SECONDS, _REPEATS, count * _WAIT_PRODUCT)
                return float(count * rows * ggml.row_size(number, columns) / seconds)


def _attention(ggml: Operations, number: int, tokens: int) -> dict[int, float]:
    """Measure the seconds of one query head and one position: head length -> seconds."""
    seconds = {}
    for length in HEAD_LENGTHS:
        with ggml.tensors() as context:
            query = ggml.tensor(context, TENSOR_TYPES["F32"].number, length, tokens, _HEADS)
            # The layout of llama.cpp's cache: all heads of a position, then the next position.
            cells = (ggml.tensor(context, number, length, _KV_HEADS, _POSITIONS) for _ in range(2))
            keys, values = (ggml.permute(context, cell, 0, 2, 1, 3) for cell in cells)
            mask = ggml.tensor(context, TENSOR_TYPES["F16"].number, _POSITIONS, tokens)
            result = ggml.flash_attn_ext(context, query, keys, values, mask, 1.0, 0.0, 0.0)
            if not ggml.supports(result):
                continue
            with ggml.memory(context, ggml.plain):
                seconds[length] = ggml.seconds(result, _SECONDS, _REPEATS) / (_HEADS * _POSITIONS * tokens)
    return seconds


def _operation(ggml: Operations) -> float:
    with ggml.tensors() as context:
        result = first = ggml.tensor(context, TENSOR_TYPES["F32"].number, LONG_ROW)
        for _ in range(_OPERATIONS):
            result = ggml.add(context, result, first)
        with ggml.memory(context, ggml.plain):
            return ggml.seconds(result, _SECONDS, _REPEATS, _OPERATIONS * _WAIT) / _OPERATIONS


def _keep_memory() -> None:
    """Make glibc keep freed memory: returning pages and getting them again takes longer than a measurement."""
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            library.mallopt(option, 2 * _LARGE[1])

"""The job `trial`: verify a written model file. Its numbers must be finite, and llama.cpp must load it."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from llmrun import _native
from llmrun.engine.llama.quantization import loads_without_weights, log_to
from llmrun.engine.llama.tensors import row_check, type_numbers
from llmrun.errors import BadModelError
from llmrun.gguf.header import Tensor
from llmrun.gguf.reader import read_header
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.trial import TryFile


def run(command: TryFile, report: Callable[[Empty], None], flag: _native.CancelFlag) -> Empty:
    """Verify the file; raises as require_sound()."""
    require_sound(command.path, read_header(Path(command.path)).tensors, command.threads)
    return Empty()


def require_sound(path: str, tensors: Sequence[Tensor], threads: int) -> None:
    """Require that every number is finite, and that llama.cpp loads the file.

    Raises:
        BadModelError: the file fails; with the reason.
    """
    if broken := _not_finite(path, tensors, threads):
        raise BadModelError(f"{broken} of the new file holds numbers that are not finite")
    require_loads(path)


def require_loads(path: str) -> None:
    """Require that llama.cpp loads everything but the weights.

    Raises:
        BadModelError: llama.cpp can't load the file; with its own error.
    """
    log: list[str] = []
    with log_to(log.append):
        loads = loads_without_weights(path)
    if not loads:
        lines = "".join(log).splitlines()
        reason = next((line.strip() for line in lines if "error" in line.lower()), "")
        raise BadModelError(f"llama.cpp can't load {Path(path).name}", why=reason)


def _not_finite(path: str, tensors: Sequence[Tensor], n_threads: int) -> str:
    """Return the first tensor with a number that is not finite; "" without any."""
    from concurrent.futures import ThreadPoolExecutor

    is_valid, numbers = row_check(), type_numbers()
    # A private mapping, because ctypes gives addresses of writable memory only.
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:  # noqa: PTH123
        start = ctypes.c_char.from_buffer(data)
        address = ctypes.addressof(start)

        def check(tensor: Tensor) -> bool:
            is_finite = is_valid(numbers[tensor.type], address + tensor.offset, tensor.n_bytes)
            if sys.platform == "linux":  # release the pages, which would count as the process's memory
                first = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
                if tensor.offset + tensor.n_bytes - first >= mmap.PAGESIZE:
                    data.madvise(mmap.MADV_DONTNEED, first, tensor.offset + tensor.n_bytes - first)
            return bool(is_finite)

        try:
            with ThreadPoolExecutor(n_threads) as pool:
                results = zip(tensors, pool.map(check, tensors), strict=True)
                return next((tensor.name for tensor, is_finite in results if not is_finite), "")
        finally:
            del start

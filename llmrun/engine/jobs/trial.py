"""The job `trial`: whether a file that was just written is good. Its numbers are finite, and llama.cpp loads it.

Owns the proof; must not know who wrote the file.
"""

from __future__ import annotations

import ctypes
import mmap
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
    """Try the file.

    Raises:
        BadModelError: it is not good; says why.
    """
    require_sound(command.path, read_header(Path(command.path)).tensors, command.threads)
    return Empty()


def require_sound(path: str, tensors: Sequence[Tensor], threads: int) -> None:
    """See that every number is finite, and that llama.cpp loads the file.

    Raises:
        BadModelError: one is not, or it does not.
    """
    if broken := _not_finite(path, tensors, threads):
        raise BadModelError(f"{broken} of the new file holds numbers that are not finite")
    require_loads(path)


def require_loads(path: str) -> None:
    """See that llama.cpp loads everything but the weights.

    Raises:
        BadModelError: it does not; with its own words.
    """
    heard: list[str] = []
    with log_to(heard.append):
        loads = loads_without_weights(path)
    if not loads:
        lines = "".join(heard).splitlines()
        why = next((line.strip() for line in lines if "error" in line.lower()), "")
        raise BadModelError(f"llama.cpp can't load {Path(path).name}", why=why)


def _not_finite(path: str, tensors: Sequence[Tensor], n_threads: int) -> str:
    """The first tensor that ggml finds a number in which is none; "" when all are well."""
    from concurrent.futures import ThreadPoolExecutor

    is_valid, numbers = row_check(), type_numbers()
    # A private mapping, because ctypes tells addresses of writable memory only.
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:  # noqa: PTH123
        start = ctypes.c_char.from_buffer(data)
        address = ctypes.addressof(start)

        def check(tensor: Tensor) -> bool:
            good = is_valid(numbers[tensor.type], address + tensor.offset, tensor.n_bytes)
            if hasattr(mmap, "MADV_DONTNEED"):  # the pages are the file's own: they need not count as ours
                first = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
                if tensor.offset + tensor.n_bytes - first >= mmap.PAGESIZE:
                    data.madvise(mmap.MADV_DONTNEED, first, tensor.offset + tensor.n_bytes - first)
            return bool(good)

        try:
            with ThreadPoolExecutor(n_threads) as pool:
                results = zip(tensors, pool.map(check, tensors), strict=True)
                return next((tensor.name for tensor, good in results if not good), "")
        finally:
            del start

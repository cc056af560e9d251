"""The jobs `quantize` and `trial`: llama_model_quantize, its log, and the verification of a written file.

llama.cpp reads the mapped source and quantizes one tensor at a time on all threads; its log is the only report of its
progress. A sound file has finite numbers only, and llama.cpp loads it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun import _native
from llmrun.engine.llama.ggml import row_check, type_numbers
from llmrun.engine.llama.quantization import check_layout, loads_without_weights, log_to, quantize
from llmrun.errors import BadModelError, OutOfMemoryError, ResourceError, UsageError
from llmrun.gguf.header import Tensor
from llmrun.gguf.imatrix import ImatrixFile, read_imatrix
from llmrun.gguf.reader import read_header
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.quantize import Quantize, Quantized, QuantizeUpdate, TryFile
from llmrun.protocol.repeating import repeating

if TYPE_CHECKING:
    from llmrun.engine.jobs.file_weights import FileWeights


_UPDATE_SECONDS = 0.1
_SYNC_SECONDS = 0.5
_DISK = "iostream error"  # C++'s message for a failed write
_MEMORY = "bad_alloc"
_INVALID = "validation failed"
_PATTERN = re.compile(r"regex|regular expression")

_TENSOR = re.compile(r"\[ *\d+/ *\d+\] (?P<name>.+?) +- \[[\d, ]+\], type = +(?P<before>\w+), ")
_AFTER = re.compile(r"converting to (?P<written>\w+) \.\.|size = .*-> .*\((?P<planned>\w+)\)$")
_SIZE = re.compile(r"size = +[\d.]+ MiB")
_FALLBACK = re.compile(r"warning: (?P<name>.+?) +- ncols .*\(required for type +(?P<requested>\w+)\)")
_UNIMPORTANT = re.compile(r"====== .*: (?:did not find weights|imatrix size .* tensor size \d+) for (?P<name>.+)$")
_FAILED = re.compile(r"failed to quantize: (?P<reason>.*)$")


def run_quantize(command: Quantize, report: Callable[[QuantizeUpdate], None], flag: _native.CancelFlag) -> Quantized:
    """Write and verify the file, or only report its types.

    Raises:
        BadModelError: llama.cpp refuses the model, or the file fails the verification.
        UsageError: llama.cpp refuses a regular expression, or the file is not an importance matrix.
        ResourceError: the file can't be written.
        OutOfMemoryError: there is no memory for a tensor.
    """
    check_layout()
    log = _Log()
    with log_to(log.add), _reporting(command.target, log, report) if command.target else nullcontext():
        _quantize(command, log)
    if command.target:
        _verify(command, log.types)
    else:
        require_loads(command.source)
    return Quantized(log.types, log.requested, log.needs_imatrix, tuple(log.unimportant))


class _Log:
    """A parser of llama.cpp's log."""

    def __init__(self) -> None:
        self.types: dict[str, str] = {}  # these four as in Quantized
        self.requested: dict[str, str] = {}
        self.needs_imatrix = False
        self.unimportant: list[str] = []
        self.done = 0  # tensors written
        self.error = ""  # the last error
        self.tensor = ""
        self._partial = ""  # line without its end

    def add(self, text: str) -> None:
        """Parse a piece of the log; a line comes in several."""
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._line(line)

    def _line(self, line: str) -> None:
        if match := _FAILED.search(line):  # first, because it may follow a tensor's text on the same line
            self.error = match["reason"]
            if tensor := _TENSOR.match(line):
                self.tensor = tensor["name"]
        elif match := _TENSOR.match(line):
            self.tensor = match["name"]
            self.types[self.tensor] = match["before"].upper()
        elif match := _FALLBACK.match(line):
            self.requested[match["name"]] = match["requested"].upper()
        elif match := _UNIMPORTANT.match(line):
            self.unimportant.append(match["name"])
        elif "will require an imatrix" in line:
            self.needs_imatrix = True
        elif "error" in line.lower() and not self.error:
            self.error = line.strip()
        if match := _AFTER.search(line):  # on a separate line after a warning
            self.types[self.tensor] = (match["written"] or match["planned"]).upper()
        if _SIZE.search(line):
            self.done += 1


@contextmanager
def _reporting(target: str, log: _Log, report: Callable[[QuantizeUpdate], None]) -> Iterator[None]:
    """Report progress inside the block, and sync the file meanwhile, so that the final sync is short."""

    def report_progress() -> None:
        with suppress(OSError):
            report(QuantizeUpdate(log.done, Path(target).stat().st_size))

    def sync() -> None:
        with suppress(OSError), Path(target).open("rb") as file:  # the front's final sync raises every error
            os.fsync(file.fileno())

    with repeating(_UPDATE_SECONDS, report_progress), repeating(_SYNC_SECONDS, sync):
        yield


def _quantize(command: Quantize, log: _Log) -> None:
    weights: dict[str, Any] = {}
    facts: dict[str, str | int] = {}
    if command.imatrix:
        imatrix = read_imatrix(Path(command.imatrix))
        weights, facts = imatrix.weights(), _facts(Path(command.imatrix).name, imatrix)
    if quantize(command, weights, facts):
        return
    name = Path(command.source).name
    if _DISK in log.error:
        raise ResourceError(f"{command.target!r} can't be written", why="the system refused a write")
    if _MEMORY in log.error:
        raise OutOfMemoryError(f"there is no memory to quantize {name}", why="a tensor and its copies have to fit")
    if _PATTERN.search(log.error):
        raise UsageError("llama.cpp can't read a --tensor-type pattern", why=log.error, hint="e.g. 'ffn_down=Q6_K'")
    if _INVALID in log.error and log.tensor:
        raise BadModelError(
            f"tensor {log.tensor!r} of {name} can't be quantized",
            why="it has numbers that are not finite, or too large for the type",
            hint=f"keep it as it is with --tensor-type '{re.escape(log.tensor.removesuffix('.weight'))}=BF16'",
        )
    raise BadModelError(f"llama.cpp can't quantize {name}", why=log.error)


def _facts(name: str, imatrix: ImatrixFile) -> dict[str, str | int]:
    """Return llama-quantize's metadata about an importance matrix."""
    facts: dict[str, str | int] = {"file": name}  # not the whole path, which is private
    if imatrix.datasets:
        facts["dataset"] = imatrix.datasets[0]
    facts["entries_count"] = len(imatrix.entries)
    if imatrix.n_chunks > 0:
        facts["chunks_count"] = imatrix.n_chunks
    return {f"quantize.imatrix.{key}": value for key, value in facts.items()}


def _verify(command: Quantize, types: dict[str, str]) -> None:
    """Verify the written file: its types are the log's, its numbers finite, and llama.cpp loads it."""
    tensors = read_header(Path(command.target)).tensors
    if {tensor.name: tensor.type for tensor in tensors} != types:
        raise BadModelError("the new file's tensors are not those of the log", hint="run the same command again")
    require_sound(command.target, tensors, command.threads)
    _require_numbers(command)


def _require_numbers(command: Quantize) -> None:
    """Require that no matrix has become zeros, of whatever cause."""
    from llmrun.engine.jobs.file_weights import FileWeights  # imports NumPy, which a plan does without

    headers = read_header(Path(command.source)), read_header(Path(command.target))
    source, target = (FileWeights(header, command.threads) for header in headers)
    for tensor in target.header.tensors:
        before = source.find(tensor.name)
        if before is None or before.type == tensor.type or len(tensor.shape) < 2:
            continue
        rows = tensor.shape[1]
        for number in range(prod(tensor.shape[2:])):
            place = number * rows, (number + 1) * rows
            if not _has_numbers(target, tensor, *place) and _has_numbers(source, before, *place):
                raise BadModelError(
                    f"tensor {tensor.name!r} has become zeros" + (f" in matrix {number}" if number else ""),
                    why="its source has other numbers",
                    hint="another --imatrix, or none, may help" if command.imatrix else "choose another --type",
                )


def _has_numbers(weights: FileWeights, tensor: Tensor, start: int, end: int) -> bool:
    """Return whether some of these rows are not all zeros; the first few rows mostly tell."""
    step = 1
    while start < end:
        if weights.rows(tensor, start, min(start + step, end)).any():
            return True
        start, step = start + step, min(step * 4, 1024)
    return False


def run_trial(command: TryFile, report: Callable[[Empty], None], flag: _native.CancelFlag) -> Empty:
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

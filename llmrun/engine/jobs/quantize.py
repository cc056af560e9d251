"""The job `quantize`: llama_model_quantize, what its log tells, and the proof that the file is good.

Owns how llama.cpp is asked and understood; must not know where files go or what people are told. It reads the source
mapped into memory and computes a tensor on all threads at a time. Its only word meanwhile is its log.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llmrun import _native
from llmrun.engine.jobs.trial import require_loads, require_sound
from llmrun.engine.llama.quantization import check_layout, log_to, quantize
from llmrun.errors import BadModelError, OutOfMemoryError, ResourceError, UsageError
from llmrun.gguf.imatrix import ImatrixFile, read_imatrix
from llmrun.gguf.reader import read_header
from llmrun.protocol.jobs.quantize import Quantize, Quantized, QuantizeUpdate

_UPDATE_SECONDS = 0.1
_SYNC_SECONDS = 0.5
_DISK = "iostream error"  # all that C++ says when a write fails
_MEMORY = "bad_alloc"
_PATTERN = re.compile(r"regex|regular expression")

_TENSOR = re.compile(r"\[ *\d+/ *\d+\] (?P<name>.+?) +- \[[\d, ]+\], type = +(?P<before>\w+), ")
_AFTER = re.compile(r"converting to (?P<written>\w+) \.\.|size = .*-> .*\((?P<planned>\w+)\)$")
_SIZE = re.compile(r"size = +[\d.]+ MiB")
_FALLBACK = re.compile(r"warning: (?P<name>.+?) +- ncols .*\(required for type +(?P<wanted>\w+)\)")
_UNIMPORTANT = re.compile(r"====== .*: (?:did not find weights|imatrix size .* tensor size \d+) for (?P<name>.+)$")
_FAILED = re.compile(r"failed to quantize: (?P<why>.*)$")


def run(command: Quantize, report: Callable[[QuantizeUpdate], None], flag: _native.CancelFlag) -> Quantized:
    """Say what would be written, or write and verify it.

    Raises:
        BadModelError: llama.cpp refuses the model, or what was written is not what it should be.
        UsageError: llama.cpp refuses a regular expression, or the importance matrix is not one.
        ResourceError: the file can't be written.
        OutOfMemoryError: there is no memory for it.
    """
    check_layout()
    log = _Log()
    with log_to(log.add):
        if command.target:
            with _reporting(command.target, log, report):
                _quantize(command, log)
        else:
            _quantize(command, log)
    if command.target:
        _verify(command, log.types)
    else:
        require_loads(command.source)
    return Quantized(log.types, log.wanted, log.needs_imatrix, tuple(log.unimportant))


class _Log:
    """Makes sense of llama.cpp's log.

    Attributes:
        types: tensor -> type that it gets.
        wanted: tensor -> type that its rows did not allow.
        needs_imatrix: llama.cpp will refuse to write this without an importance matrix.
        done: how many tensors are written.
        unimportant: tensors that the importance matrix has no weights for.
        error: the last thing that was wrong.
    """

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        self.wanted: dict[str, str] = {}
        self.needs_imatrix = False
        self.done = 0
        self.unimportant: list[str] = []
        self.error = ""
        self._tensor = ""
        self._begun = ""

    def add(self, text: str) -> None:
        """A piece of the log: lines come in several."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._line(line)

    def _line(self, line: str) -> None:
        if found := _FAILED.search(line):  # it may have begun as a tensor's
            self.error = found["why"]
        elif found := _TENSOR.match(line):
            self._tensor = found["name"]
            self.types[self._tensor] = found["before"].upper()
        elif found := _FALLBACK.match(line):
            self.wanted[found["name"]] = found["wanted"].upper()
        elif found := _UNIMPORTANT.match(line):
            self.unimportant.append(found["name"])
        elif "will require an imatrix" in line:
            self.needs_imatrix = True
        elif "error" in line.lower() and not self.error:
            self.error = line.strip()
        if found := _AFTER.search(line):  # on a line of its own when there was a warning in between
            self.types[self._tensor] = (found["written"] or found["planned"]).upper()
        if _SIZE.search(line):
            self.done += 1


@contextmanager
def _reporting(target: str, log: _Log, report: Callable[[QuantizeUpdate], None]) -> Iterator[None]:
    """Inside, tell how far the file is, and bring it to the disk bit by bit, so that its end need not wait for it."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(_UPDATE_SECONDS):
            with suppress(OSError):
                report(QuantizeUpdate(log.done, Path(target).stat().st_size))

    def sync() -> None:
        with suppress(OSError):  # the front syncs once more and hears of every error
            descriptor = os.open(target, os.O_RDONLY)
            while not over.wait(_SYNC_SECONDS):
                os.fsync(descriptor)
            os.close(descriptor)

    threads = [threading.Thread(target=each, daemon=True) for each in (tell, sync)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        threads[0].join()


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
    raise BadModelError(f"llama.cpp can't quantize {name}", why=log.error)


def _facts(name: str, imatrix: ImatrixFile) -> dict[str, str | int]:
    """What llama-quantize writes into the file's metadata about an importance matrix."""
    facts: dict[str, str | int] = {"file": name}  # not the whole path: who gets the model need not know it
    if imatrix.datasets:
        facts["dataset"] = imatrix.datasets[0]
    facts["entries_count"] = len(imatrix.entries)
    if imatrix.n_chunks > 0:
        facts["chunks_count"] = imatrix.n_chunks
    return {f"quantize.imatrix.{key}": value for key, value in facts.items()}


# ---- is what was written good? ---------------------------------------------------------------------


def _verify(command: Quantize, types: dict[str, str]) -> None:
    """Read the file as a stranger would.

    Raises:
        BadModelError: its tensors are not those that were meant, not finite, or llama.cpp does not load it.
    """
    tensors = read_header(Path(command.target)).tensors
    if {tensor.name: tensor.type for tensor in tensors} != types:
        raise BadModelError("the new file's tensors are not those that were meant", hint="run the same command again")
    require_sound(command.target, tensors, command.threads)

"""Collects an importance matrix: which columns of a model's matrices matter, because large numbers meet them.

Owns what text that is seen on, how much of it, and that the file is there whole or not at all; the engine reads (and,
where there is no text, writes) it, gguf/imatrix.py and imatrix_file.py know the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from llmrun.errors import BadModelError
from llmrun.gguf.imatrix import ImatrixEntry, ImatrixFile, read_imatrix
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.models.store import new_file
from llmrun.planning.hardware import probe
from llmrun.protocol.jobs.importance import IMPORTANCE, CalibrationPrompt, Importance, ImportanceSums, ImportanceUpdate
from llmrun.quantize.imatrix_file import require_fit, unused_experts, write_imatrix
from llmrun.quantize.prompts import OPENINGS, QUESTIONS
from llmrun.runner.runner import Runner
from llmrun.storage import disk_errors

OnUpdate = Callable[[ImportanceUpdate], None]

N_TOKENS = 4_096
"""As many as the model writes at most: in tests/benchmarks/imatrix.py, 1,024 were as good as 5,120."""
MAX_SECONDS = 600.0
"""Of writing. Large models get fewer tokens; those tell nearly as much."""
MAX_READ_TOKENS = 131_072
"""Of somebody's own text: 256 pieces, more than anybody has found a use for."""

_FEW_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """An importance matrix that was written.

    Attributes:
        path: of the file.
        n_tensors: how many matrices it knows.
        n_tokens: of the text that was read.
        written_tokens: how many of them the model wrote itself; 0 where there was a text.
        writing_seconds: how long that took.
        reading_seconds: how long reading took.
        text: what the model wrote.
        notes: what somebody should know, a sentence each.
    """

    path: Path
    n_tensors: int
    n_tokens: int
    written_tokens: int
    writing_seconds: float
    reading_seconds: float
    text: str
    notes: tuple[str, ...] = ()


def collect(
    model: Path,
    target: Path,
    *,
    text: Path | None,
    threads: int | None = None,
    on_update: OnUpdate = lambda update: None,
    n_tokens: int | None = None,
    seconds: float = MAX_SECONDS,
    seed: int = 0,
    gpu_layers: int = -1,
    includes_output: bool = False,
    engine: Runner | None = None,
) -> CalibrationResult:
    """Let the model read a text, and write what that shows as llama.cpp's imatrix GGUF.

    The same model, text and seed give the same file, unless writing took too long or threads differ.

    Args:
        model: the (first) GGUF file of the model, as precise as there is one.
        target: the file to write; what is there stays until the new one is complete.
        text: the text, in UTF-8; None lets the model write one.
        threads: None is all cores.
        on_update: is told how far it is.
        n_tokens: how many tokens to write, or to read of the text, at most.
        seconds: how long to write at most.
        includes_output: as Importance.
        engine: a running one that may be used; it is closed if anything goes wrong.

    Raises:
        UsageError: the text is too short, or the model can't write one; the target is the model or the text.
        ModelNotFoundError: the text, or the model, is not there.
        BadModelError: the model is damaged, or computes something that is not a number.
        OutOfMemoryError: there is no memory for the model.
        DiskFullError, ResourceError: the file can't be written.
        EngineCrashedError: llama.cpp crashed.
    """
    new_file.refuse_inputs(target, [model, *([text] if text else [])])
    check(read_header(model))
    command = Importance(
        model=str(model.absolute()),
        sums=str(new_file.temporary(target, "sums").absolute()),
        text=str(text.absolute()) if text else "",
        prompts=() if text else tuple(_prompts()),
        n_tokens=n_tokens or (MAX_READ_TOKENS if text else N_TOKENS),
        seconds=seconds,
        seed=seed,
        threads=threads or probe().usable_cores,
        gpu_layers=gpu_layers,
        includes_output=includes_output,
    )
    summed, entries = _sum(command, target, engine, on_update)
    imatrix = ImatrixFile(entries, (_dataset(text, summed, seed),), summed.n_chunks, summed.chunk_size)
    write_imatrix(target, imatrix)
    return _collected(target, imatrix, summed)


def prepare_imatrix(imatrix: Path, model: Path, target: Path, check_file: Callable[[Path], None]) -> Path:
    """An importance matrix that somebody has, ready for the engine: checked, and in GGUF.

    Args:
        imatrix: the file.
        model: the (first) GGUF file of the model it should fit.
        target: where to write it in GGUF if it is of the older format.
        check_file: called with the target before it is written; raises if that must not be.

    Returns:
        Which of the two to use.

    Raises:
        UsageError: it is not an importance matrix, or of another model.
        BadModelError: it is damaged.
        ModelNotFoundError: one of the files is not there.
    """
    read = read_imatrix(imatrix)
    require_fit(read, read_header(model), imatrix)
    with imatrix.open("rb") as file:
        if file.read(4) == b"GGUF":
            return imatrix
    new_file.refuse_inputs(target, [imatrix, model])
    check_file(target)
    write_imatrix(target, read)
    return target


def _collected(target: Path, imatrix: ImatrixFile, summed: ImportanceSums) -> CalibrationResult:
    return CalibrationResult(
        path=target,
        n_tensors=len(imatrix.entries),
        n_tokens=summed.n_tokens,
        written_tokens=summed.written_tokens,
        writing_seconds=summed.writing_seconds,
        reading_seconds=summed.reading_seconds,
        text=summed.text,
        notes=tuple(_notes(imatrix, summed)),
    )


def _sum(
    command: Importance, target: Path, engine: Runner | None, on_update: OnUpdate
) -> tuple[ImportanceSums, dict[str, ImatrixEntry]]:
    """Have the engine do it, and read what it left."""
    sums = Path(command.sums)
    new_file.remove_leftovers(target.parent)
    with disk_errors(target):
        sums.touch()  # better now than after minutes
    own = engine or Runner()
    try:
        summed = own.do(IMPORTANCE, command, on_update)
        return summed, _entries(sums, summed)
    finally:
        sums.unlink(missing_ok=True)
        if engine is None:
            own.close()


def _prompts() -> Iterator[CalibrationPrompt]:
    """Both kinds in turn."""
    pairs = zip(QUESTIONS, OPENINGS, strict=True)
    return chain.from_iterable(
        (CalibrationPrompt(question, True), CalibrationPrompt(opening, False)) for question, opening in pairs
    )


def _entries(path: Path, summed: ImportanceSums) -> dict[str, ImatrixEntry]:
    """What the engine left in its file."""
    import numpy as np

    with disk_errors(path):
        numbers = np.fromfile(path, "<f4").astype(np.float32)
    entries, at = {}, 0
    for tensor in summed.tensors:
        end = at + tensor.n_sums
        sums, counts = numbers[at:end], numbers[end : end + tensor.n_counts]
        entries[tensor.name] = ImatrixEntry(sums.reshape(tensor.n_counts, -1), counts)
        at = end + tensor.n_counts
    if at != numbers.size or not entries:
        raise BadModelError(
            "no activations could be collected from this model",
            why="" if entries else "none of its matrices has a name that llama.cpp's importance matrices know",
        )
    return entries


def _dataset(text: Path | None, summed: ImportanceSums, seed: int) -> str:
    if text:
        return text.name
    return f"{summed.written_tokens} tokens that the model wrote itself (llmrun, seed {seed})"


def _notes(imatrix: ImatrixFile, summed: ImportanceSums) -> Iterator[str]:
    if not summed.written_tokens and summed.n_tokens < _FEW_TOKENS:
        yield f"the calibration text has only {summed.n_tokens:,} tokens; {N_TOKENS:,} show more"
    if not summed.written_tokens and summed.n_tokens > MAX_READ_TOKENS - summed.chunk_size:
        yield f"only the first {summed.n_tokens:,} tokens of the calibration text were read"
    unused = unused_experts(imatrix)
    if unused:
        count, total = sum(unused.values()), sum(entry.counts.size for entry in imatrix.entries.values())
        yield (
            f"{count:,} of {total:,} experts were never used by the text: their columns count evenly; "
            "a longer text reaches more of them"
        )

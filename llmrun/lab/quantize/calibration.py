"""Collection of an importance matrix: the mean squared activations that each column of a model's matrices meets.

The engine reads the calibration text, and writes it if there is none. gguf/imatrix.py reads the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np

from llmrun.errors import BadModelError, UsageError, listed
from llmrun.gguf.header import Header
from llmrun.gguf.imatrix import CHUNK_SIZE, COUNTS, DATASETS, N_CHUNKS, SUMS, ImatrixEntry, ImatrixFile, read_imatrix
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.lab.convert.checkpoint import array_source
from llmrun.lab.convert.gguf_file import OutputTensor, write_model
from llmrun.models.store import new_file
from llmrun.planning.hardware import probe
from llmrun.protocol.jobs.importance import IMPORTANCE, CalibrationPrompt, Importance, ImportanceSums, ImportanceUpdate
from llmrun.runner.client import EngineClient
from llmrun.storage import disk_errors

QUESTIONS = (
    "Explain how a suspension bridge carries its load.",
    "Write a Python function that merges two sorted lists, with a docstring and an example.",
    "Write a short dialogue between a customer and a baker.",
    "Solve step by step: a train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive?",
    "List ten things to pack for a hiking trip, one line each.",
    "Explique brièvement comment fonctionne la photosynthèse.",
    "Write the opening scene of a mystery novel set in a small harbour town.",
    "What is the difference between TCP and UDP? Give a table.",
    "Schreibe eine höfliche E-Mail, in der ein Termin verschoben wird.",
    "Give a JSON object that describes a book with title, authors, year, and tags.",
    "Who was Marie Curie, and why is she remembered?",
    "Translate into Spanish: The library is open until eight, except on Sundays.",
    "Write a poem of eight lines about the first snow.",
    "My laptop gets hot and slow. What should I check?",
    "Summarize the causes of the First World War in five bullet points.",
    "用中文简单介绍一下长城的历史。",
    "Write a SQL query that finds the three customers with the highest total orders, and explain it.",
    "Describe the taste of a mango to somebody who never ate one.",
    "Is it better to rent or to buy a home? Discuss both sides.",
    "Напиши короткий рассказ о старом маяке.",
    "Write a product description for a wooden desk lamp.",
    "What happens in the body during a fever?",
    "Prove that the sum of two even numbers is even.",
    "Give me a recipe for vegetable soup, with quantities.",
)
"""For models with a chat template."""

OPENINGS = (
    "The river rises in the mountains of",
    "#include <stdio.h>\n\nint main(void) {\n",
    "Chapter 1\n\nIt was late in the evening when",
    "In this paper we study",
    "import os\nimport sys\n\n\ndef main():\n",
    "The 1974 season was the club's",
    "Breaking news: the government announced today that",
    "Q: What is the capital of Australia?\nA:",
    "La ville de",
    '{"name": "example", "version": "1.0", "items": [',
    "She was born in 1902 in",
    "<!DOCTYPE html>\n<html>\n<head>\n<title>",
    "Der Begriff",
    "Dear Sir or Madam,\n\nI am writing to",
    "The song was written by",
    "# Installation\n\nTo install the package,",
    "According to the report, the number of",
    "function parse(input) {\n",
    "Theorem. Let",
    "El sistema solar",
    "The species is found in",
    '"I don\'t think so," he said.',
    "Ingredients:\n- 2 cups of",
    "The battle began on the morning of",
)
"""Plain text, for every model."""


_MAX_NAME_BYTES = 63 - len(SUMS)  # GGML_MAX_NAME
_SHOWN = 3


def write_imatrix(target: Path, imatrix: ImatrixFile) -> None:
    """Write a file for llama-quantize; after an error the target is unchanged.

    Raises:
        DiskFullError: there is no room for the file.
        ResourceError: the file can't be written there.
        UsageError: a tensor's name is too long for the format.
    """
    tensors = []
    for name, entry in sorted(imatrix.entries.items()):
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise UsageError(f"tensor {name!r} has a name too long for an importance matrix")
        tensors.append(OutputTensor(name + SUMS, "F32", array_source(name, entry.sums)))
        tensors.append(OutputTensor(name + COUNTS, "F32", array_source(name, entry.counts.reshape(-1, 1))))
    metadata = {
        "general.type": "imatrix",
        DATASETS: list(imatrix.datasets),
        N_CHUNKS: imatrix.n_chunks,
        CHUNK_SIZE: imatrix.chunk_size,
    }
    write_model(target, metadata, tensors, rules=lambda header: None)


def require_fit(imatrix: ImatrixFile, header: Header, path: Path) -> None:
    """Raise UsageError unless an importance matrix is of this model, or of one of the same shape.

    Args:
        header: of the model.
        path: of the importance matrix, for the message.
    """
    tensors = {tensor.name: tensor for tensor in header.tensors}
    hint = "collect one on this model: --imatrix auto"
    unknown = [name for name in imatrix.entries if name not in tensors]
    if unknown:
        raise UsageError(
            f"the importance matrix {str(path)!r} is of another model",
            why=f"{header.path.name} has no {listed(unknown, _SHOWN)}",
            hint=hint,
        )
    columns = {name: tensors[name].shape[0] * prod(tensors[name].shape[2:]) for name in imatrix.entries}
    misfits = [
        f"{name} has {columns[name]:,} columns in the model, {entry.sums.size:,} in the file"
        for name, entry in imatrix.entries.items()
        if entry.sums.size != columns[name]
    ]
    if misfits:
        raise UsageError(
            f"the importance matrix {str(path)!r} is of another model", why="; ".join(misfits[:_SHOWN]), hint=hint
        )


def unused_experts(imatrix: ImatrixFile) -> dict[str, int]:
    """Return tensor -> number of experts that the calibration text never reached, if any."""
    counts = {name: int((entry.counts == 0).sum()) for name, entry in imatrix.entries.items()}
    return {name: count for name, count in counts.items() if count}


OnUpdate = Callable[[ImportanceUpdate], None]

N_TOKENS = 4_096
"""Maximum number of tokens that the model writes: in tests/benchmarks/imatrix.py, 1,024 were as good as 5,120."""
MAX_SECONDS = 600.0
"""Time limit of writing. Slow models write fewer tokens, which are nearly as good."""
MAX_READ_TOKENS = 131_072
"""Maximum number of tokens of the user's text: 256 chunks, beyond which no benefit is known."""

_FEW_TOKENS = 1_024


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
    engine: EngineClient | None = None,
) -> tuple[ImportanceSums, list[str]]:
    """Collect an importance matrix while the model reads a text, and write it as llama.cpp's imatrix GGUF.

    Return what the engine summed, and notes for the user, a sentence each.

    The same model, text and seed give the same file, unless writing reached its time limit or threads differ.

    Args:
        model: the (first) GGUF file of the model, as precise as available.
        target: the file to write; an existing one stays until the new one is complete.
        text: the text file in UTF-8; None lets the model write a text.
        n_tokens: maximum number of tokens to write, or to read from the text.
        seconds: time limit of writing.
        engine: a running engine to use; it is closed after an error.

    Raises:
        UsageError: the text is too short, or the model can't write one; the target is the model or the text.
        ModelNotFoundError: the text or the model is missing.
        BadModelError: the model is damaged, or computes NaN.
        OutOfMemoryError, EngineCrashedError: the engine can't load or run the model.
        DiskFullError, ResourceError: the file can't be written.
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
    own_text = f"{summed.written_tokens} tokens written by the model itself (llmrun, seed {seed})"
    imatrix = ImatrixFile(entries, (text.name if text else own_text,), summed.n_chunks, summed.chunk_size)
    write_imatrix(target, imatrix)
    return summed, list(_notes(imatrix, summed))


def prepare_imatrix(imatrix: Path, model: Path, target: Path, check_file: Callable[[Path], None]) -> Path:
    """Check the user's importance matrix and return its path, after converting the older format to GGUF.

    Args:
        model: the (first) GGUF file of its model.
        target: path of the GGUF file if the matrix has the older format.
        check_file: called with the target before it is written; raises to forbid writing.

    Raises:
        UsageError: the file is not an importance matrix, or one of another model.
        BadModelError, ModelNotFoundError: a file is damaged or missing.
    """
    content = read_imatrix(imatrix)
    require_fit(content, read_header(model), imatrix)
    with imatrix.open("rb") as file:
        if file.read(4) == b"GGUF":
            return imatrix
    new_file.refuse_inputs(target, [imatrix, model])
    check_file(target)
    write_imatrix(target, content)
    return target


def _sum(
    command: Importance, target: Path, engine: EngineClient | None, on_update: OnUpdate
) -> tuple[ImportanceSums, dict[str, ImatrixEntry]]:
    """Collect the sums in the engine, and read them from its file."""
    sums = Path(command.sums)
    new_file.remove_leftovers(target.parent)
    with disk_errors(target):
        sums.touch()  # raises now rather than after minutes
    try:
        with nullcontext(engine) if engine else closing(EngineClient()) as running:
            summed = running.do(IMPORTANCE, command, on_update)
        return summed, _entries(sums, summed)
    finally:
        sums.unlink(missing_ok=True)


def _prompts() -> Iterator[CalibrationPrompt]:
    """Yield questions and openings alternately."""
    pairs = zip(QUESTIONS, OPENINGS, strict=True)
    return chain.from_iterable(
        (CalibrationPrompt(question, True), CalibrationPrompt(opening, False)) for question, opening in pairs
    )


def _entries(path: Path, summed: ImportanceSums) -> dict[str, ImatrixEntry]:
    """Read the sums and counts in the engine's file."""
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
            why="" if entries else "none of its matrices has a name that importance matrices contain",
        )
    return entries


def _notes(imatrix: ImatrixFile, summed: ImportanceSums) -> Iterator[str]:
    if not summed.written_tokens and summed.n_tokens < _FEW_TOKENS:
        yield f"the calibration text has only {summed.n_tokens:,} tokens; {N_TOKENS:,} are better"
    if not summed.written_tokens and summed.n_tokens > MAX_READ_TOKENS - summed.chunk_size:
        yield f"only the first {summed.n_tokens:,} tokens of the calibration text were read"
    unused = unused_experts(imatrix)
    if unused:
        count, total = sum(unused.values()), sum(entry.counts.size for entry in imatrix.entries.values())
        yield (
            f"{count:,} of {total:,} experts were never used by the text, so their columns count equally; "
            "a longer text reaches more of them"
        )

"""From the user's words to a request: the source, the type or size, and the importance matrix."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.config import load_settings
from llmrun.errors import ModelNotFoundError, OutOfMemoryError, UsageError
from llmrun.gguf.filenames import is_later_part, quant_of
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.gguf.types import FILE_TYPES
from llmrun.lab.quantize.job import OnProgress, QuantizeRequest, all_cores, needs_imatrix, preview
from llmrun.lab.quantize.types import (
    BEST_4_BIT,
    NEED_IMATRIX,
    UNQUANTIZED,
    TensorTypes,
    best_4_bit,
    file_type,
    slow_prompts,
)
from llmrun.models.location import locate, not_on_disk
from llmrun.models.store import new_file
from llmrun.models.store.new_file import temporary
from llmrun.planning.hardware import Hardware, probe
from llmrun.planning.memory import memory
from llmrun.planning.plan import margin, trained_context
from llmrun.protocol.sizes import readable_size
from llmrun.system import user_path

if TYPE_CHECKING:
    from llmrun.lab.quantize.mix import Mix
    from llmrun.runner.client import EngineClient


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Located source."""

    path: Path  # of the first GGUF file, or of a Hugging Face folder
    name: str  # stem of the names of new files
    is_folder: bool


def find(text: str) -> SourceFile:
    """Find a source on this disk, without the network.

    Raises:
        ModelNotFoundError: the source is not on this disk; the hint says how to get it.
        UsageError: the text can't be a model's name.
    """
    folder = user_path(text)
    if (folder / "config.json").is_file():
        return SourceFile(folder, folder.resolve().name, True)
    if folder.is_dir() and not any(folder.glob("*.gguf")):
        raise ModelNotFoundError(
            f"there is no model in the folder {text!r}",
            why="it has neither Hugging Face's config.json nor a .gguf file",
            hint="name a .gguf file, or the folder that contains config.json",
        )
    located = locate(text, load_settings())
    if located.path is None:
        raise not_on_disk(text)
    return SourceFile(located.path, model_stem(located.path, located.spec.alias), False)


def model_stem(path: Path, alias: str | None = None) -> str:
    """Return a file's name without type and part, or the catalogue's name if nothing else is left."""
    if is_later_part(path.name):
        raise UsageError(f"{path.name!r} is not the first part of its model", hint="name the one with -00001-of-")
    stem = path.name.removesuffix(".gguf").removesuffix(".GGUF")
    stem = stem.partition("-00001-of-")[0]
    quant = quant_of(stem)
    for ending in (quant, quant and quant.replace("F", "FP")):
        if ending and stem.upper().endswith(ending) and len(stem) > len(ending) + 1:
            return stem[: -len(ending)].rstrip("-_.")
    return stem or alias or "model"


@contextmanager
def open_source(
    source: SourceFile, folder: Path, on_progress: OnProgress, say: Callable[[str], None] = lambda text: None
) -> Iterator[Header]:
    """Yield the header of the GGUF file to read; a folder is converted to a temporary file for the block.

    Args:
        folder: folder of the temporary file.
        say: called with each note about a conversion.

    Raises:
        BadModelError: the model is damaged, or llama.cpp can't run it.
        UsageError: the model can't be converted.
    """
    if not source.is_folder:
        header = read_header(source.path)
        check(header)
        yield header
        return

    from llmrun.lab.convert.job import convert_folder  # imports numpy

    path = temporary(folder / f"{source.name}.gguf", "converted")
    try:
        converted = convert_folder(
            source.path, path, on_progress=lambda done, total: on_progress("converting", done / total if total else 1.0)
        )
        for note in converted.notes:
            say(f"note: {note}")
        yield replace(read_header(path), path=path)
    finally:
        path.unlink(missing_ok=True)


# ---- the size

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) ?([kmgt]?)(i?)b?", re.IGNORECASE)
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MIN_BITS = 1.0
"""No type has fewer."""


@dataclass(frozen=True, slots=True)
class SizeGoal:
    """Target size instead of a type; false if none is set."""

    n_bytes: int = 0  # upper bound of the file's size; 0 if not set
    bits: float = 0.0  # average per weight; 0 if not set
    fits: bool = False  # the largest size that fits into memory beside a context window ...
    n_ctx: int | None = None  # ... of N tokens; None for the trained context
    label: str = ""  # for the file's name, e.g. "4.5bpw"

    def __bool__(self) -> bool:
        return bool(self.n_bytes or self.bits or self.fits)


def read_size(text: str) -> int:
    """Parse "4GB", "900 MB", "3.5GiB" or "120000000" into bytes. Raises UsageError if the text is not a size."""
    match = _SIZE.fullmatch(text.strip())
    n_bytes = int(float(match[1]) * (1024 if match[3] else 1000) ** _PREFIXES[match[2].lower()]) if match else 0
    if n_bytes <= 0:
        raise UsageError(f"--size {text} is not a size", hint="--size 4GB, --size 900MB or --size 3.5GiB")
    return n_bytes


def goal_bytes(goal: SizeGoal, header: Header, hardware: Hardware) -> int:
    """Return the file size of a goal.

    Raises:
        UsageError: the model is not larger than that, or can't be made so small.
        OutOfMemoryError: no type makes the model fit into memory.
    """
    head = header.file_size - header.weight_bytes
    target = goal.n_bytes
    if goal.bits:
        target = head + int(goal.bits * header.n_parameters / 8)
    elif goal.fits:
        target = _largest_fitting(header, hardware, goal.n_ctx)
    if target >= header.file_size and goal.fits:
        raise UsageError(f"{header.path.name!r} fits into memory as it is", hint="name a --type to make it smaller")
    if target >= header.file_size:
        raise UsageError(
            f"{header.path.name!r} is not larger than that already",
            why=f"it has {readable_size(header.file_size)}, {header.bits_per_weight:.2f} bits per weight; "
            f"{readable_size(target)} are allowed",
            hint="choose a smaller size, or name a --type",
        )
    minimum = head + int(_MIN_BITS * header.n_parameters / 8)
    if target < minimum:
        raise UsageError(
            f"{header.path.name!r} can't be made as small as {readable_size(target)}",
            why=f"{header.n_parameters:,} weights of {_MIN_BITS:g} bit each take {readable_size(minimum)}",
            hint="choose a smaller model",
        )
    return target


def _largest_fitting(header: Header, hardware: Hardware, n_ctx: int | None) -> int:
    window = n_ctx or trained_context(header)
    free = hardware.memory_available
    overhead = memory(header, window).needed - header.weight_bytes
    room = free - margin(free) - overhead
    if room <= header.n_parameters * _MIN_BITS / 8:
        raise OutOfMemoryError(
            f"no type makes {header.path.name!r} fit into memory",
            why=f"{readable_size(free)} are free, and {window:,} tokens of context take {readable_size(overhead)}",
            hint="choose a smaller context: --fit --ctx 4096" if window > 4096 else "choose a smaller model",
        )
    return room


# ---- the type and the importance matrix

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class QuantizeOptions(TensorTypes):
    """The user's options."""

    type: str = BEST_4_BIT  # a name of gguf.types.FILE_TYPES or types.BEST_4_BIT
    goal: SizeGoal = field(default_factory=SizeGoal)  # a size instead of a type
    imatrix: str = ""  # "", AUTO or a path
    calibration: Path | None = None  # text for the importance matrix; None for one written by the model
    threads: int | None = None

    @property
    def label(self) -> str:
        """Suffix of the new file's name; "" until the type is resolved."""
        return self.goal.label if self.goal else "" if self.type == BEST_4_BIT else self.type


def read_options(type_: str, options: QuantizeOptions) -> QuantizeOptions:
    """Return the options with a parsed type, after the checks that don't need the model.

    Args:
        type_: as typed; "" for the best 4-bit type.

    Raises:
        UsageError: an option is invalid, or two can't be used together.
    """
    if options.goal and type_:
        raise UsageError("--type and a size can't be used together", why="all types follow from the size")
    if options.goal and options.flags:
        raise UsageError(
            "a size and types of single tensors can't be used together", why="they all follow from the size"
        )
    type_name = file_type(type_) if type_ else BEST_4_BIT
    if type_name in NEED_IMATRIX and not options.imatrix:
        raise needs_imatrix(type_name)
    if type_name in UNQUANTIZED and options.imatrix:
        raise UsageError(f"an importance matrix has no effect on {type_name}", why="it is for quantized types")
    return replace(options, type=type_name)


def decide(
    options: QuantizeOptions,
    header: Header,
    target: Callable[[str], Path],
    say: Callable[[str], None],
    on_progress: OnProgress,
    engine: EngineClient | None = None,
    *,
    check_file: Callable[[Path], None],
) -> QuantizeRequest:
    """Resolve the open options; collecting an importance matrix and finding a mix may take minutes.

    Args:
        header: of the source.
        target: returns the file to write for a label.
        say: called with each message about a choice and its reason.
        engine: a running engine to use; it stays open.
        check_file: called with each additional file before it is written; raises to forbid writing.

    Raises:
        UsageError: the options don't fit the model.
    """
    type_name = options.type if options.goal else resolve_type(options.type, header, say)
    if slow := slow_prompts(type_name, probe().cpu_flags):
        say(f"note: {slow}")
    path = target(options.goal.label if options.goal else type_name)
    threads = options.threads or all_cores(probe())
    request = QuantizeRequest(
        source=header.path,
        target=path,
        type=type_name,
        threads=threads,
        **options.tensor_types(),
    )
    n_bytes = goal_bytes(options.goal, header, probe()) if options.goal else 0
    if options.imatrix == AUTO and not options.goal and type_name not in NEED_IMATRIX:
        preview(request, engine)  # refuses an invalid request before minutes of collecting
    imatrix = importance_matrix(options, header, path, say, on_progress, check_file)
    if options.goal:
        from llmrun.lab.quantize.mix import choose  # imports numpy

        mix = choose(
            header.path,
            n_bytes,
            imatrix=imatrix,
            threads=threads,
            on_progress=lambda share: on_progress("measuring each tensor's error", share),
        )
        assert mix.base in FILE_TYPES
        _describe(mix, n_bytes, say)
        request = replace(request, type=mix.base, overrides=tuple(mix.overrides))
    return replace(request, imatrix=imatrix)


def _describe(mix: Mix, n_bytes: int, say: Callable[[str], None]) -> None:
    """Report the mix by kind of tensor, the largest first."""
    say(
        f"the best mix within {readable_size(n_bytes)} ({n_bytes:,} bytes) takes {mix.n_bytes:,}; "
        f"expected KLD {mix.divergence:.4f}:"
    )
    width = max((len(row.kind) for row in mix.table), default=0)
    for row in mix.table:
        types = ", ".join(f"{count} {type_name}" for type_name, count in row.types.items())
        say(f"  {row.kind:{width}}  {readable_size(row.n_bytes):>9}  {types}")


def resolve_type(type_name: str, header: Header, say: Callable[[str], None]) -> str:
    """Return the best 4-bit type of this machine for types.BEST_4_BIT, and any other type unchanged."""
    if type_name != BEST_4_BIT:
        return type_name
    hardware = probe()
    choice = best_4_bit(header.tensors, hardware.cpu_flags, gpu=bool(hardware.gpus) or sys.platform == "darwin")
    say(f"int4 is {choice.type} here: {choice.why}")
    return choice.type


def importance_matrix(
    options: QuantizeOptions,
    header: Header,
    target: Path,
    say: Callable[[str], None],
    on_progress: OnProgress,
    check_file: Callable[[Path], None],
) -> Path | None:
    """Return the importance matrix: the user's file, or one that is collected and stored beside the target."""
    if not options.imatrix:
        return None

    from llmrun.lab.quantize.calibration import collect, prepare_imatrix  # imports numpy

    path = target.with_name(f"{target.name.removesuffix('.gguf')}.imatrix.gguf")
    if options.imatrix != AUTO:
        return prepare_imatrix(Path(options.imatrix), header.path, path, check_file)
    new_file.refuse_inputs(path, [header.path])
    check_file(path)
    _, notes = collect(
        header.path,
        path,
        text=options.calibration,
        threads=options.threads,
        on_update=lambda update: on_progress(f"importance matrix, {update.phase}", update.share),
    )
    for note in notes:
        say(f"note: {note}")
    say(f"the importance matrix is in {path}; reuse it with --imatrix {path}")
    return path

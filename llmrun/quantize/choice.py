"""The decisions that turn a user's options into a quantization request: the type, the mix, the importance matrix.

Owns the order of these decisions and the messages about them; other modules make each decision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.types import FILE_TYPES
from llmrun.models.store import new_file
from llmrun.planning.hardware import probe
from llmrun.protocol.sizes import readable_size
from llmrun.quantize.job import OnProgress, QuantizeRequest, all_cores, needs_imatrix, preview
from llmrun.quantize.size import SizeGoal, goal_bytes
from llmrun.quantize.types import (
    BEST_4_BIT,
    NEED_IMATRIX,
    UNQUANTIZED,
    TensorTypes,
    best_4_bit,
    file_type,
    slow_prompts,
)

if TYPE_CHECKING:
    from llmrun.quantize.mix import Mix
    from llmrun.runner.client import EngineClient

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
    kind = file_type(type_) if type_ else BEST_4_BIT
    if kind in NEED_IMATRIX and not options.imatrix:
        raise needs_imatrix(kind)
    if kind in UNQUANTIZED and options.imatrix:
        raise UsageError(f"an importance matrix has no effect on {kind}", why="it is for quantized types")
    return replace(options, type=kind)


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
    kind = options.type if options.goal else resolve_type(options.type, header, say)
    if slow := slow_prompts(kind, probe().cpu_flags):
        say(f"note: {slow}")
    path = target(options.goal.label if options.goal else kind)
    threads = options.threads or all_cores(probe())
    request = QuantizeRequest(
        source=header.path,
        target=path,
        type=kind,
        threads=threads,
        **options.tensor_types(),
    )
    n_bytes = goal_bytes(options.goal, header, probe()) if options.goal else 0
    if options.imatrix == AUTO and not options.goal and kind not in NEED_IMATRIX:
        preview(request, engine)  # refuses an invalid request before minutes of collecting
    imatrix = importance_matrix(options, header, path, say, on_progress, check_file)
    if options.goal:
        from llmrun.quantize.mix import choose

        mix = choose(
            header.path,
            n_bytes,
            imatrix=imatrix,
            threads=threads,
            on_update=lambda update: on_progress("measuring each tensor's error", update.share),
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
        types = ", ".join(f"{count} {kind}" for kind, count in row.types.items())
        say(f"  {row.kind:{width}}  {readable_size(row.n_bytes):>9}  {types}")


def resolve_type(kind: str, header: Header, say: Callable[[str], None]) -> str:
    """Return the best 4-bit type of this machine for types.BEST_4_BIT, and any other type unchanged."""
    if kind != BEST_4_BIT:
        return kind
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
    from llmrun.quantize.calibration import collect, prepare_imatrix

    path = target.with_name(f"{target.name.removesuffix('.gguf')}.imatrix.gguf")
    if options.imatrix != AUTO:
        return prepare_imatrix(Path(options.imatrix), header.path, path, check_file)
    new_file.refuse_inputs(path, [header.path])
    check_file(path)
    collected = collect(
        header.path,
        path,
        text=options.calibration,
        threads=options.threads,
        on_update=lambda update: on_progress(f"importance matrix, {update.phase}", update.share),
    )
    for note in collected.notes:
        say(f"note: {note}")
    say(f"the importance matrix is in {path}; reuse it with --imatrix {path}")
    return path

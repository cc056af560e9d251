"""From what somebody wishes to what is to be done: the type, the mix, the importance matrix.

Owns the order of these decisions and what is said about them; each is made elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import UsageError
from llmrun.gguf.header import Header
from llmrun.models.store import new_file
from llmrun.planning.hardware import Hardware, probe
from llmrun.protocol.sizes import readable_size
from llmrun.quantize.job import OnProgress, QuantizeRequest, all_cores, needs_imatrix, preview
from llmrun.quantize.size import SizeGoal, goal_bytes
from llmrun.quantize.types import BEST_4_BIT, FILE_TYPES, NEED_IMATRIX, UNQUANTIZED, best_4_bit, file_type, slow_prompts

if TYPE_CHECKING:
    from llmrun.quantize.mix import Mix
    from llmrun.runner.runner import Runner

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What somebody wishes. Fields as in job.Request, but for these.

    Attributes:
        type: a name of types.FILE_TYPES or types.BEST_4_BIT.
        goal: a size in place of a type.
        imatrix: "", AUTO or a path.
        calibration: text to collect the importance matrix on; None is what the model writes itself.
    """

    type: str = BEST_4_BIT
    goal: SizeGoal = field(default_factory=SizeGoal)
    overrides: tuple[tuple[str, str], ...] = ()
    output_type: str = ""
    embedding_type: str = ""
    pure: bool = False
    keeps_output: bool = False
    imatrix: str = ""
    calibration: Path | None = None
    threads: int | None = None

    @property
    def label(self) -> str:
        """What tells the new file's name from others of the model; "" as long as the type is not known."""
        return self.goal.label if self.goal else "" if self.type == BEST_4_BIT else self.type


def read_options(type_: str, wish: QuantizeOptions) -> QuantizeOptions:
    """A wish with its type, checked as far as that goes without the model.

    Args:
        type_: as typed; "" is the best 4-bit type.

    Raises:
        UsageError: it is invalid; says what is not.
    """
    if wish.goal and type_:
        raise UsageError("--type and a size exclude each other", why="all types follow from the size")
    if wish.goal and (wish.overrides or wish.output_type or wish.embedding_type or wish.pure or wish.keeps_output):
        raise UsageError("a size and types of single tensors exclude each other", why="they all follow from the size")
    kind = file_type(type_) if type_ else BEST_4_BIT
    if kind in NEED_IMATRIX and not wish.imatrix:
        raise needs_imatrix(kind)
    if kind in UNQUANTIZED and wish.imatrix:
        raise UsageError(f"an importance matrix does nothing for {kind}", why="it is for quantized types")
    return replace(wish, type=kind)


def decide(
    wish: QuantizeOptions,
    header: Header,
    target: Callable[[str], Path],
    say: Callable[[str], None],
    on_progress: OnProgress,
    engine: Runner | None = None,
    *,
    check_file: Callable[[Path], None],
) -> QuantizeRequest:
    """Choose what was left open. Collecting an importance matrix and finding a mix take their time.

    Args:
        header: of what is quantized.
        target: gives the file to write, from a label for its name.
        say: gets sentences about what was chosen, and why.
        engine: a running one that may be used, and goes on living.
        check_file: called with each other file before it is written; raises if that must not be.

    Raises:
        UsageError: it can't be done; says why.
    """
    kind = wish.type if wish.goal else settled(wish.type, header, say)
    if slow := slow_prompts(kind, probe().cpu_flags):
        say(f"note: {slow}")
    path = target(wish.goal.label if wish.goal else kind)
    threads = wish.threads or all_cores(probe())
    request = QuantizeRequest(
        source=header.path,
        target=path,
        type=kind,
        overrides=wish.overrides,
        output_type=wish.output_type,
        embedding_type=wish.embedding_type,
        threads=threads,
        pure=wish.pure,
        keeps_output=wish.keeps_output,
    )
    n_bytes = goal_bytes(wish.goal, header, probe()) if wish.goal else 0
    if wish.imatrix == AUTO and not wish.goal and kind not in NEED_IMATRIX:
        preview(request, engine)  # what is invalid is refused before minutes of collecting
    imatrix = importance_matrix(wish, header, path, say, on_progress, check_file)
    if wish.goal:
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
    """The mix by kinds of tensors, those with most bytes first."""
    say(
        f"the best mix within {readable_size(n_bytes)} ({n_bytes:,} bytes) takes {mix.n_bytes:,}; "
        f"a KLD of {mix.divergence:.4f} is to be expected:"
    )
    width = max((len(row.kind) for row in mix.table), default=0)
    for row in mix.table:
        types = ", ".join(f"{count} {kind}" for kind, count in row.types.items())
        say(f"  {row.kind:{width}}  {readable_size(row.n_bytes):>9}  {types}")


def settled(kind: str, header: Header, say: Callable[[str], None]) -> str:
    """A type in place of types.BEST_4_BIT; others stay."""
    if kind != BEST_4_BIT:
        return kind
    hardware = probe()
    choice = best_4_bit(header.tensors, hardware.cpu_flags, gpu=_has_gpu(hardware))
    say(f"int4 is {choice.type} here: {choice.why}")
    return choice.type


def importance_matrix(
    wish: QuantizeOptions,
    header: Header,
    target: Path,
    say: Callable[[str], None],
    on_progress: OnProgress,
    check_file: Callable[[Path], None],
) -> Path | None:
    """The importance matrix: the file that was named, or one that is collected and kept beside the target.

    Args:
        check_file: as in decide().
    """
    if not wish.imatrix:
        return None
    from llmrun.quantize.calibration import collect, prepared

    path = target.with_name(f"{target.name.removesuffix('.gguf')}.imatrix.gguf")
    if wish.imatrix != AUTO:
        return prepared(Path(wish.imatrix), header.path, path, check_file)
    new_file.refuse_inputs(path, [header.path])
    check_file(path)
    collected = collect(
        header.path,
        path,
        text=wish.calibration,
        threads=wish.threads,
        on_update=lambda update: on_progress(f"importance matrix, {update.phase}", update.share),
    )
    for note in collected.notes:
        say(f"note: {note}")
    say(f"the importance matrix is in {path}: --imatrix {path} uses it again")
    return path


def _has_gpu(hardware: Hardware) -> bool:
    """Whether a GPU will compute: one that ggml was seen to use, or a Mac's."""
    return bool(hardware.gpus) or sys.platform == "darwin"

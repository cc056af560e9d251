"""One quantization, from the wish to the file: what would come out, whether that makes sense, and the file itself.

Owns the order and what is refused; the engine computes, cli shows it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import BadModelError, ResourceError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import padded, read_header
from llmrun.models.store import new_file
from llmrun.planning.hardware import Hardware, probe
from llmrun.protocol.jobs.quantize import QUANTIZE, Quantize, Quantized, QuantizeUpdate
from llmrun.quantize.types import (
    FILE_TYPES,
    NEED_IMATRIX,
    TENSOR_TYPES,
    UNQUANTIZED,
    cost,
    is_quantized,
    tensor_bytes,
    unfit,
)
from llmrun.runner.runner import Runner

OnProgress = Callable[[str, float], None]
"""Gets (what is being done, how much of it: 0 to 1)."""

_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """What is to be made of what.

    Attributes:
        source: the (first) GGUF file.
        target: the file to write; what is there stays until the new one is complete and verified.
        type: a name of types.FILE_TYPES.
        overrides: (regular expression, name of types.TENSOR_TYPES) for tensors whose name contains a match; the first
            that fits counts.
        output_type: of the output matrix, a name of types.TENSOR_TYPES; "" leaves it to the type.
        embedding_type: the same for the token embedding.
        imatrix: an importance matrix of llama.cpp's, in GGUF.
        threads: None is all cores.
        pure: every matrix gets the same type.
        keeps_output: the output matrix stays as it is.
    """

    source: Path
    target: Path
    type: str
    overrides: tuple[tuple[str, str], ...] = ()
    output_type: str = ""
    embedding_type: str = ""
    imatrix: Path | None = None
    threads: int | None = None
    pure: bool = False
    keeps_output: bool = False


@dataclass(frozen=True, slots=True)
class Preview:
    """What would come out.

    Attributes:
        source: header of what is read.
        types: tensor -> type it gets, in the order in which they are written.
        n_bytes: of the file.
        notes: what somebody should know before they wait for it, a sentence each.
    """

    source: Header
    types: Mapping[str, str]
    n_bytes: int
    notes: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        """Of the whole model, scales counted."""
        tensors = {tensor.name: tensor for tensor in self.source.tensors}
        n_bytes = sum(tensor_bytes(tensors[name], kind) for name, kind in self.types.items())
        return 8 * n_bytes / max(self.source.n_parameters, 1)


@dataclass(frozen=True, slots=True)
class QuantizedFile:
    """A file that was written and verified.

    Attributes:
        type: as in the request; what most tensors are.
        n_overrides: of the request.
        source_type: e.g. "F16".
        source_bytes, n_bytes: of the files.
        bytes_per_type: type of tensors -> bytes, the most first.
        seconds: from the first look to the file being safe on the disk.
        notes: as in Preview, and what became of the importance matrix.
    """

    path: Path
    type: str
    source_type: str
    source_bytes: int
    n_bytes: int
    n_parameters: int
    bits_per_weight: float
    bytes_per_type: Mapping[str, int]
    seconds: float
    notes: tuple[str, ...] = ()
    n_overrides: int = 0


def preview(request: QuantizeRequest, engine: Runner | None = None) -> Preview:
    """Say what would be written, in some hundredths of a second; nothing is.

    Args:
        engine: a running one that may be used, and goes on living.

    Raises:
        UsageError: that is invalid; says why, and what is not.
        BadModelError: the source is damaged, or llama.cpp can't load it.
    """
    header = read_header(request.source)
    _refuse_nonsense(request, header)
    own = engine or Runner()
    try:
        planned = own.do(QUANTIZE, _command(request, ""))
    finally:
        if engine is None:
            own.close()
    if planned.needs_imatrix and request.imatrix is None:
        raise needs_imatrix(request.type)
    if planned.types.keys() != {tensor.name for tensor in header.tensors}:
        raise BadModelError(f"{request.source.name!r} has tensors of names that can't be told apart in llama.cpp's log")
    sizes = {tensor.name: tensor_bytes(tensor, planned.types[tensor.name]) for tensor in header.tensors}
    # What stands before the tensors grows by a key or two at most.
    head = header.file_size - header.weight_bytes
    found = Preview(header, planned.types, head + sum(map(padded, sizes.values())), ())
    _refuse_growth(request, header, found, sum(sizes.values()))
    notes = (*_requantizing(request, header), *_without_experts(request, header), *_fallbacks(header, planned))
    return Preview(header, planned.types, found.n_bytes, tuple(notes))


def quantize(
    request: QuantizeRequest,
    on_update: OnProgress = lambda phase, share: None,
    *,
    engine: Runner | None = None,
    outlook: Preview | None = None,
) -> QuantizedFile:
    """Write a quantized file. Whatever is raised meanwhile, Ctrl-C too, leaves the target as it was.

    Args:
        on_update: gets ("quantizing", 0 to 1).
        engine: a running one that may be used; it is closed if anything goes wrong.
        outlook: what preview() said of this request.

    Raises:
        UsageError: that is invalid; says why, and what is not.
        BadModelError: the source is damaged, or what came out of it is.
        DiskFullError: there is no room for the file.
        ResourceError: it can't be written there.
        EngineCrashedError: llama.cpp crashed.
    """
    began = time.monotonic()
    own = engine or Runner()
    try:
        outlook = outlook or preview(request, own)
        inputs = [request.source, *([request.imatrix] if request.imatrix else [])]
        new_file.refuse_inputs(request.target, inputs)
        new_file.remove_leftovers(request.target.parent)
        new_file.require_room(request.target, outlook.n_bytes)
        with new_file.arriving(request.target, outlook.n_bytes) as path:
            written = _write(request, path, outlook, own, on_update)
            made = read_header(path)
            if written.types != outlook.types:
                raise BadModelError("the new file's tensors are not those that were meant", hint="try again")
    finally:
        if engine is None:
            own.close()
    return QuantizedFile(
        path=request.target,
        type=request.type,
        source_type=outlook.source.quant,
        source_bytes=outlook.source.file_size,
        n_bytes=made.file_size,
        n_parameters=made.n_parameters,
        bits_per_weight=made.bits_per_weight,
        bytes_per_type=made.bytes_per_type,
        seconds=time.monotonic() - began,
        notes=(*outlook.notes, *_unimportant(request, written)),
        n_overrides=len(request.overrides),
    )


def _write(request: QuantizeRequest, path: Path, outlook: Preview, engine: Runner, on_update: OnProgress) -> Quantized:
    pace = _Share(outlook, weighted=request.imatrix is not None)
    try:
        return engine.do(
            QUANTIZE, _command(request, str(path)), lambda update: on_update("quantizing", pace.of(update))
        )
    except ResourceError:
        new_file.probe(path)  # raises what the system said to llama.cpp, which only knows that it failed
        raise


def _command(request: QuantizeRequest, target: str) -> Quantize:
    number = {name: kind.number for name, kind in TENSOR_TYPES.items()}
    return Quantize(
        source=str(request.source.absolute()),
        target=target and str(Path(target).absolute()),
        file_type=FILE_TYPES[request.type],
        overrides=tuple((pattern, number[kind]) for pattern, kind in request.overrides),
        output_type=number.get(request.output_type, -1),
        embedding_type=number.get(request.embedding_type, -1),
        imatrix=str(request.imatrix.absolute()) if request.imatrix else "",
        threads=request.threads or all_cores(probe()),
        pure=request.pure,
        keeps_output=request.keeps_output,
    )


def all_cores(hardware: Hardware) -> int:
    """How many threads to quantize with: it does not wait for memory, so both threads of a core count."""
    quota = hardware.cpu_quota
    return max(1, hardware.logical_cores if quota is None else min(hardware.logical_cores, round(quota)))


class _Share:
    """How much of the work is done: tensors weighed by what their type costs, within one by bytes."""

    def __init__(self, outlook: Preview, *, weighted: bool = False) -> None:
        tensors = {tensor.name: tensor for tensor in outlook.source.tensors}
        at, work = outlook.source.file_size - outlook.source.weight_bytes, 0.0
        self._bytes, self._work = [at], [work]  # as they are when so many tensors are done
        for name, kind in outlook.types.items():
            at += padded(tensor_bytes(tensors[name], kind))
            work += cost(tensors[name].n_elements, tensors[name].type, kind, weighted=weighted)
            self._bytes.append(at)
            self._work.append(work)

    def of(self, update: QuantizeUpdate) -> float:
        """0 to 1."""
        done = min(update.tensors, len(self._work) - 1)
        work = self._work[done]
        if done + 1 < len(self._work):
            first, last = self._bytes[done : done + 2]
            within = (update.n_bytes - first) / max(last - first, 1)
            work += min(max(within, 0.0), 1.0) * (self._work[done + 1] - work)
        return work / max(self._work[-1], 1.0)


# ---- what is invalid, and what should be known -------------------------------------------------


def needs_imatrix(name: str) -> UsageError:
    """The error for a type that has to know which weights matter."""
    return UsageError(
        f"{name} needs an importance matrix",
        why="with so few bits it has to be known which weights matter; llama.cpp refuses without",
        hint="add --imatrix auto, which collects one from the model itself, or --imatrix FILE",
    )


def _refuse_nonsense(request: QuantizeRequest, header: Header) -> None:
    if request.type in NEED_IMATRIX and request.imatrix is None:
        raise needs_imatrix(request.type)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if request.type in UNQUANTIZED and (request.overrides or request.pure):
        flag = "--tensor-type" if request.overrides else "--pure"
        raise UsageError(f"{flag} does nothing with {request.type}", why="it is for quantized types")
    tied = _OUTPUT not in tensors
    wishes = [(_OUTPUT, request.output_type, "--output-type"), (_EMBEDDING, request.embedding_type, "--embedding-type")]
    for name, kind, flag in wishes:
        rows = unfit(tensors, _EMBEDDING if tied else name, kind) if kind else 0
        if rows:
            raise UsageError(
                f"{flag} {kind} does not fit this model",
                why=f"its rows of {rows} weights don't divide into blocks of {TENSOR_TYPES[kind].block}",
                hint=f"{flag} Q8_0",
            )


def _refuse_growth(request: QuantizeRequest, header: Header, outlook: Preview, weight_bytes: int) -> None:
    name = header.path.name
    if all(outlook.types[tensor.name] == tensor.type for tensor in header.tensors):
        raise UsageError(f"{name!r} is {header.quant} already: nothing would change", hint="choose another --type")
    if request.type not in UNQUANTIZED and weight_bytes >= header.weight_bytes:
        raise UsageError(
            f"{request.type} is larger than what {name!r} is now",
            why=f"its weights have {header.bits_per_weight:.2f} bits; in {outlook.bits_per_weight:.2f} bits they would "
            "be no better, for what is lost is lost",
            hint="choose a smaller --type, or quantize a file in F16 or BF16 of the same model",
        )


def _requantizing(request: QuantizeRequest, header: Header) -> list[str]:
    if not is_quantized(header.bytes_per_type):
        return []
    if request.type in UNQUANTIZED:
        return [f"the source is {header.quant}: as {request.type} it gets larger, not better"]
    return [
        f"the source is quantized already ({header.quant}), and what it lost stays lost: "
        f"from a file in F16 or BF16, {request.type} answers better"
    ]


def _without_experts(request: QuantizeRequest, header: Header) -> list[str]:
    if request.type != "MXFP4_MOE" or header.n_experts:
        return []
    return ["MXFP4_MOE is for experts, and this model has none: all of it gets Q8_0"]


def _fallbacks(header: Header, planned: Quantized) -> list[str]:
    if not planned.wanted:
        return []
    rows = Counter(tensor.shape[0] for tensor in header.tensors if tensor.name in planned.wanted)
    swaps = Counter((planned.types.get(name, "?"), wanted) for name, wanted in planned.wanted.items())
    swapped = ", ".join(f"{count} {new} in place of {old}" for (new, old), count in swaps.most_common())
    length = rows.most_common(1)[0][0] if rows else 0
    verb = "gets" if len(planned.wanted) == 1 else "get"
    return [
        f"{len(planned.wanted)} of {len(header.tensors)} tensors {verb} another type, because rows of {length:,} "
        f"weights don't divide into its blocks: {swapped}"
    ]


def _unimportant(request: QuantizeRequest, written: Quantized) -> list[str]:
    missing = [name for name in written.unimportant if name not in (_EMBEDDING, _OUTPUT)]
    if request.imatrix is None or not missing:
        return []
    return [f"{len(missing)} tensors are not in the importance matrix, {missing[0]} for one: they count evenly"]

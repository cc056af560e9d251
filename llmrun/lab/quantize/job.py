"""Quantization of one model: checks of the request, an estimate of the result, and the file itself.

The engine computes.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from llmrun.errors import BadModelError, LlmrunError, ResourceError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.imatrix import read_imatrix
from llmrun.gguf.reader import padded, read_header
from llmrun.gguf.types import FILE_TYPES
from llmrun.lab.quantize.types import (
    COPY_TYPE,
    NEED_IMATRIX,
    TENSOR_TYPES,
    UNQUANTIZED,
    TensorTypes,
    cost,
    has_slow_prompts,
    is_quantized,
    tensor_bytes,
    unfit,
)
from llmrun.models.store import new_file
from llmrun.planning.hardware import Hardware, probe
from llmrun.protocol.jobs.quantize import QUANTIZE, Quantize, Quantized, QuantizeUpdate
from llmrun.runner.client import EngineClient

OnProgress = Callable[[str, float], None]
"""Called with (phase, share done: 0 to 1)."""

_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"
_HEADS = re.compile(r"^blk\.\d+\.nextn\.")


@dataclass(frozen=True, slots=True)
class QuantizeRequest(TensorTypes):
    """The settings of one quantization."""

    source: Path  # the (first) GGUF file
    target: Path  # the file to write; an existing one stays until the new one is complete and verified
    type: str  # a name of gguf.types.FILE_TYPES
    imatrix: Path | None = None  # llama.cpp's importance matrix in GGUF
    threads: int | None = None  # None for all cores


@dataclass(frozen=True, slots=True)
class Preview:
    """Expected result of a quantization."""

    source: Header
    types: Mapping[str, str]  # tensor -> new type, in the order of writing
    n_bytes: int  # of the file
    notes: tuple[str, ...]  # warnings before a long wait, a sentence each

    @property
    def bits_per_weight(self) -> float:
        """Average over all weights, scales included."""
        tensors = {tensor.name: tensor for tensor in self.source.tensors}
        n_bytes = sum(tensor_bytes(tensors[name], type_name) for name, type_name in self.types.items())
        return 8 * n_bytes / max(self.source.n_parameters, 1)


@dataclass(frozen=True, slots=True)
class QuantizedFile:
    """Written and verified file."""

    path: Path
    type: str  # of the request; most tensors have it
    source_type: str  # e.g. "F16"
    source_bytes: int
    n_bytes: int
    n_parameters: int
    bits_per_weight: float
    bytes_per_type: Mapping[str, int]  # type of tensors -> bytes, in descending order
    seconds: float  # from the preview to the flushed file
    notes: tuple[str, ...] = ()  # of Preview, and about the importance matrix
    n_overrides: int = 0


def preview(request: QuantizeRequest, engine: EngineClient | None = None) -> Preview:
    """Return the expected result without writing it; takes some hundredths of a second.

    Args:
        engine: a running engine to use; it stays open.

    Raises:
        UsageError: the request is invalid.
        BadModelError: the source is damaged, or llama.cpp can't load it.
    """
    header = read_header(request.source)
    _refuse_invalid(request, header)
    with nullcontext(engine) if engine else closing(EngineClient()) as running:
        planned = running.do(QUANTIZE, _command(request, header, ""))
    if planned.needs_imatrix and request.imatrix is None:
        raise needs_imatrix(request.type)
    if planned.types.keys() != {tensor.name for tensor in header.tensors}:
        raise BadModelError(f"{request.source.name!r} has tensors with ambiguous names in llama.cpp's log")
    sizes = {tensor.name: tensor_bytes(tensor, planned.types[tensor.name]) for tensor in header.tensors}
    # The part before the tensors grows by a key or two at most.
    head = header.file_size - header.weight_bytes
    estimate = Preview(header, planned.types, head + sum(map(padded, sizes.values())), ())
    _refuse_growth(request, header, estimate, sum(sizes.values()))
    notes = [*_requantizing(request, header), *_fallbacks(header, planned)]
    if request.type == "MXFP4_MOE" and not header.n_experts:
        notes.append("MXFP4_MOE is for experts, and this model has none: all tensors get Q8_0")
    return replace(estimate, notes=tuple(notes))


def quantize(
    request: QuantizeRequest,
    on_update: OnProgress = lambda phase, share: None,
    *,
    engine: EngineClient | None = None,
    estimate: Preview | None = None,
) -> QuantizedFile:
    """Write a quantized file; an exception, Ctrl-C included, leaves the target unchanged.

    Args:
        on_update: called with ("quantizing", 0 to 1).
        engine: a running engine to use; it is closed after an error.
        estimate: result of preview() for this request.

    Raises:
        UsageError: the request is invalid.
        BadModelError: the source or the new file is damaged.
        DiskFullError, ResourceError: the file can't be written.
        EngineCrashedError: llama.cpp crashed.
    """
    began = time.monotonic()
    with nullcontext(engine) if engine else closing(EngineClient()) as running:
        estimate = estimate or preview(request, running)
        inputs = [request.source, *([request.imatrix] if request.imatrix else [])]
        new_file.refuse_inputs(request.target, inputs)
        new_file.remove_leftovers(request.target.parent)
        new_file.require_room(request.target, estimate.n_bytes)
        with new_file.arriving(request.target, estimate.n_bytes) as path:
            written = _write(request, path, estimate, running, on_update)
            made = read_header(path)
            if written.types != estimate.types:
                raise BadModelError("the new file's tensors have unexpected types", hint="try again")
    return QuantizedFile(
        path=request.target,
        type=request.type,
        source_type=estimate.source.quant,
        source_bytes=estimate.source.file_size,
        n_bytes=made.file_size,
        n_parameters=made.n_parameters,
        bits_per_weight=made.bits_per_weight,
        bytes_per_type=made.bytes_per_type,
        seconds=time.monotonic() - began,
        notes=(*estimate.notes, *_unimportant(request, written)),
        n_overrides=len(request.overrides),
    )


def _write(
    request: QuantizeRequest, path: Path, estimate: Preview, engine: EngineClient, on_update: OnProgress
) -> Quantized:
    pace = _Share(estimate, weighted=request.imatrix is not None)
    try:
        return engine.do(
            QUANTIZE,
            _command(request, estimate.source, str(path)),
            lambda update: on_update("quantizing", pace.of(update)),
        )
    except ResourceError:
        new_file.probe(path)  # raises the system's error, which llama.cpp does not pass on
        raise


def _command(request: QuantizeRequest, header: Header, target: str) -> Quantize:
    number = {name: tensor_type.number for name, tensor_type in TENSOR_TYPES.items()}
    overrides = (*request.overrides, *_kept_heads(request, header))
    return Quantize(
        source=str(request.source.absolute()),
        target=target and str(Path(target).absolute()),
        file_type=FILE_TYPES[request.type],
        overrides=tuple((pattern, number[type_name]) for pattern, type_name in overrides),
        output_type=number.get(request.output_type, -1),
        embedding_type=number.get(request.embedding_type, -1),
        imatrix=str(request.imatrix.absolute()) if request.imatrix else "",
        threads=request.threads or all_cores(probe()),
        pure=request.pure,
        keeps_output=request.keeps_output,
    )


def _kept_heads(request: QuantizeRequest, header: Header) -> tuple[tuple[str, str], ...]:
    """Return an override that keeps the heads' own matrices (NextN) at 8 bits unless their importance is known.

    No importance matrix of the model's text has data for them, and what they draft is right less often then.
    """
    if not header.n_draft_heads or request.pure or request.type in {*UNQUANTIZED, "Q8_0"}:
        return ()
    if request.imatrix is not None:
        with suppress(LlmrunError):  # the engine refuses it
            if any(_HEADS.match(name) for name in read_imatrix(request.imatrix).entries):
                return ()
    return ((_HEADS.pattern, "Q8_0"),)


def all_cores(hardware: Hardware) -> int:
    """Return the number of threads for quantizing: all, since the work is not memory-bound and hyper-threads help."""
    quota = hardware.cpu_quota
    return max(1, hardware.logical_cores if quota is None else min(hardware.logical_cores, round(quota)))


class _Share:
    """Share of finished work: tensors are weighted by the cost of their type; within a tensor, bytes count."""

    def __init__(self, estimate: Preview, *, weighted: bool = False) -> None:
        tensors = {tensor.name: tensor for tensor in estimate.source.tensors}
        at, work = estimate.source.file_size - estimate.source.weight_bytes, 0.0
        self._bytes, self._work = [at], [work]  # after N tensors
        for name, type_name in estimate.types.items():
            at += padded(tensor_bytes(tensors[name], type_name))
            work += cost(tensors[name].n_elements, tensors[name].type, type_name, weighted=weighted)
            self._bytes.append(at)
            self._work.append(work)

    def of(self, update: QuantizeUpdate) -> float:
        done = min(update.tensors, len(self._work) - 1)
        work = self._work[done]
        if done + 1 < len(self._work):
            first, last = self._bytes[done : done + 2]
            within = (update.n_bytes - first) / max(last - first, 1)
            work += min(max(within, 0.0), 1.0) * (self._work[done + 1] - work)
        return work / max(self._work[-1], 1.0)


# ---- errors and notes --------------------------------------------------------------------------


def needs_imatrix(name: str) -> UsageError:
    return UsageError(
        f"{name} needs an importance matrix",
        why="with so few bits per weight, llama.cpp refuses to quantize without one",
        hint="add --imatrix auto, which collects one from the model itself, or --imatrix FILE",
    )


def _refuse_invalid(request: QuantizeRequest, header: Header) -> None:
    if request.type in NEED_IMATRIX and request.imatrix is None:
        raise needs_imatrix(request.type)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if request.type in UNQUANTIZED and (request.overrides or request.pure):
        flag = "--tensor-type" if request.overrides else "--pure"
        raise UsageError(f"{flag} has no effect with {request.type}", why="it is for quantized types")
    tied = _OUTPUT not in tensors
    requested = [
        (_OUTPUT, request.output_type, "--output-type"),
        (_EMBEDDING, request.embedding_type, "--embedding-type"),
    ]
    for name, type_name, flag in requested:
        rows = unfit(tensors, _EMBEDDING if tied else name, type_name) if type_name else 0
        if rows:
            raise UsageError(
                f"{flag} {type_name} does not fit this model",
                why=f"its rows of {rows} weights don't divide into blocks of {TENSOR_TYPES[type_name].block}",
                hint=f"{flag} Q8_0",
            )


def _refuse_growth(request: QuantizeRequest, header: Header, estimate: Preview, weight_bytes: int) -> None:
    name = header.path.name
    if all(estimate.types[tensor.name] == tensor.type for tensor in header.tensors):
        raise UsageError(f"{name!r} is {header.quant} already: nothing would change", hint="choose another --type")
    is_faster = request.type == COPY_TYPE and has_slow_prompts(header, probe())
    if request.type not in UNQUANTIZED and weight_bytes >= header.weight_bytes and not is_faster:
        raise UsageError(
            f"{request.type} would be larger than {name!r}",
            why=f"its weights have {header.bits_per_weight:.2f} bits; {estimate.bits_per_weight:.2f} bits would not "
            "restore lost precision",
            hint="choose a smaller --type, or quantize a file in F16 or BF16 of the same model",
        )


def _requantizing(request: QuantizeRequest, header: Header) -> list[str]:
    if not is_quantized(header.bytes_per_type):
        return []
    if request.type in UNQUANTIZED:
        return [f"the source is {header.quant}: {request.type} is larger, but not better"]
    return [
        f"the source is quantized already ({header.quant}), and lost precision is not restored: "
        f"{request.type} from a file in F16 or BF16 is better"
    ]


def _fallbacks(header: Header, planned: Quantized) -> list[str]:
    if not planned.wanted:
        return []
    rows = Counter(tensor.shape[0] for tensor in header.tensors if tensor.name in planned.wanted)
    swaps = Counter((planned.types.get(name, "?"), requested) for name, requested in planned.wanted.items())
    swapped = ", ".join(f"{count} {new} instead of {old}" for (new, old), count in swaps.most_common())
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
    return [f"{len(missing)} tensors, e.g. {missing[0]}, are not in the importance matrix: their weights count equally"]

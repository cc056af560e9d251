"""The GGUF file of a converted model: its tensors, and the writer, some rows at a time.

A target is complete or absent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmrun.errors import BadModelError, UsageError, listed
from llmrun.gguf.header import Header
from llmrun.gguf.reader import padded, read_header
from llmrun.gguf.rules import check, check_vocabulary
from llmrun.gguf.types import TENSOR_TYPES
from llmrun.lab.convert.architectures import (
    ANOTHER_WAY,
    Family,
    bare_name,
    expert_tensors,
    half_tensors,
    is_vision,
    required_tensors,
)
from llmrun.lab.convert.checkpoint import (
    Array,
    TensorSource,
    all_finite,
    array_source,
    encode,
    map_values,
    permute_heads,
    require_floats,
    stack_experts,
    take_half,
    to_float32,
)
from llmrun.lab.convert.folder import Config
from llmrun.lab.convert.hyperparameters import Shape
from llmrun.models.store.new_file import arriving, remove_leftovers, require_room

OnProgress = Callable[[int, int], None]

_U8, _U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 0, 4, 5, 6, 7, 8, 9
_VERSION = 3  # of the format
MAX_NAME_BYTES = 63  # GGML_MAX_NAME without the null byte
_ALWAYS_F32 = ("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight")
_HEAD = "lm_head.weight"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """Tensor of the file."""

    name: str
    type: str  # F32, F16, BF16 or Q8_0
    source: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions in ggml's order, the contiguous one first."""
        return tuple(reversed(self.source.shape))

    @property
    def n_bytes(self) -> int:
        tensor_type = TENSOR_TYPES[self.type]
        return prod(self.source.shape) // tensor_type.block * tensor_type.block_bytes

    def data(self) -> Iterator[Array]:
        """Yield the encoded data, some rows at a time.

        Raises BadModelError if a value is infinite or NaN, or becomes infinite in the output type.
        """
        for chunk in self.source.chunks(1):
            if self.source.type == self.type:
                encoded = chunk
            else:
                values = to_float32(chunk, self.source.type)
                self._require_finite(values, "F32", "")
                encoded = encode(values, self.type)
            self._require_finite(encoded, self.type, "use --type bf16" if self.type == "F16" else "use --type f32")
            yield encoded

    def _require_finite(self, values: Array, type_name: str, hint: str) -> None:
        if all_finite(values, type_name):
            return
        if hint and self.source.type != self.type:
            raise BadModelError(f"tensor {self.source.name!r} has values too large for {type_name}", hint=hint)
        raise BadModelError(
            f"tensor {self.source.name!r} has infinite or NaN values",
            why="the model is damaged, or its training went wrong",
        )


def plan_tensors(
    sources: Mapping[str, TensorSource], family: Family, config: Config, shape: Shape, type_name: str
) -> list[OutputTensor]:
    """Return the tensors of the file, in its order.

    Args:
        sources: checkpoint name -> values.
        type_name: of the matrices.

    Raises:
        BadModelError: a tensor is missing, or does not fit the shape that config.json describes.
        UsageError: there are unknown tensors.
    """
    bare = _bare_sources(sources, family)
    n_vision = sum(is_vision(name, family) for name in sources)
    if n_vision:
        shape.notes.append(f"the vision part ({n_vision} tensors) is left out: the file takes text only")
    tied = family.tied or config.flag("tie_word_embeddings")
    head = None if family.tied else bare.get(_HEAD)
    if tied and head is not None and _is_same(head, bare.get(embeddings_name(family))):
        head = None
    planned = [output_tensor(name, array_source(name, values), type_name) for name, values in shape.factors.items()]
    taken = {_HEAD} if family.name != "bert" else set()
    for hf_name, gguf_name in required_tensors(family, shape.n_layers).items():
        ends = ("weight", "bias") if f"{hf_name}.bias" in bare else ("weight",)
        planned += [_planned(bare, hf_name, end, gguf_name, family, shape, type_name) for end in ends]
        taken.update(f"{hf_name}.{end}" for end in ends)
    for gguf_name, parts in expert_tensors(family, shape.n_layers, shape.n_experts):
        experts = stack_experts(gguf_name, [_found(bare, name, family, shape) for name in parts])
        planned.append(output_tensor(gguf_name, experts, type_name))
        taken.update(parts)
    for hf_name, two in half_tensors(family, shape.n_layers):
        both = _found(bare, hf_name, family, shape)
        planned += [
            output_tensor(gguf_name, take_half(both, number), type_name) for number, gguf_name in enumerate(two)
        ]
        taken.add(hf_name)
    if head is not None:
        planned.append(output_tensor("output.weight", head, type_name))
    elif not tied:
        shape.notes.append("lm_head.weight is missing: the embeddings are used as the output matrix too")
    _refuse_unknown([name for name in bare if name not in taken])
    rows = (bare[embeddings_name(family)].shape[0], shape.metadata["embedding_length"])
    for tensor in planned:
        _check_shape(tensor, shape.dimensions | {"token_embd": rows, "output": rows})
    return planned


def _bare_sources(sources: Mapping[str, TensorSource], family: Family) -> dict[str, TensorSource]:
    bare: dict[str, TensorSource] = {}
    for name, source in sources.items():
        short = bare_name(name, family)
        if short is not None and short in bare:
            raise BadModelError(f"the tensors {name!r} and {bare[short].name!r} have the same role")
        if short is not None:
            bare[short] = require_floats(source)
    return bare


def embeddings_name(family: Family) -> str:
    return next(iter(family.outer)) + ".weight"


def count_rows(sources: Mapping[str, TensorSource], family: Family) -> int:
    """Return the number of rows of the embeddings, which is the number of tokens.

    Raises BadModelError if there are no embeddings.
    """
    embeddings = next((s for name, s in sources.items() if bare_name(name, family) == embeddings_name(family)), None)
    if embeddings is None or len(embeddings.shape) != 2 or not embeddings.shape[0]:
        raise BadModelError("the model has no embeddings", why=f"there is no tensor {embeddings_name(family)!r}")
    return embeddings.shape[0]


def _is_same(one: TensorSource, other: TensorSource | None) -> bool:
    if other is None or (one.shape, one.type) != (other.shape, other.type):
        return False
    return all(map(np.array_equal, one.chunks(1), other.chunks(1)))


def _planned(
    bare: Mapping[str, TensorSource],
    hf_name: str,
    end: str,
    gguf_name: str,
    family: Family,
    shape: Shape,
    type_name: str,
) -> OutputTensor:
    source = _found(bare, f"{hf_name}.{end}", family, shape)
    if family.permutes and hf_name.endswith(("q_proj", "k_proj")):
        source = permute_heads(source, shape.n_heads if hf_name.endswith("q_proj") else shape.n_kv_heads)
    if family.norm_shift and hf_name.endswith("norm"):
        by = np.float32(family.norm_shift)
        source = map_values(source, lambda values: values + by)
    return output_tensor(f"{gguf_name}.{end}", source, type_name)


def _found(bare: Mapping[str, TensorSource], name: str, family: Family, shape: Shape) -> TensorSource:
    source = bare.get(name)
    if source is None:
        experts = f" with {shape.n_experts} experts each" if shape.n_experts else ""
        raise BadModelError(
            f"the model has no tensor {name!r}",
            why=f"config.json describes a {family.name} model of {shape.n_layers} layers{experts}",
            hint="download the missing files again",
        )
    if not all(source.shape) or len(source.shape) > (3 if family.halves else 2):
        raise BadModelError(f"tensor {source.name!r} has the shape {list(source.shape)}")
    return source


def output_tensor(name: str, source: TensorSource, type_name: str) -> OutputTensor:
    """Choose the type: float32 for vectors and norms, float16 if rows don't divide into blocks, else `type_name`."""
    assert len(name) <= MAX_NAME_BYTES, "the tables hold short names"
    if len(source.shape) < 2 or name.endswith(_ALWAYS_F32):
        return OutputTensor(name, "F32", source)
    if source.shape[-1] % TENSOR_TYPES[type_name].block:
        return OutputTensor(name, "F16", source)
    return OutputTensor(name, type_name, source)


def _refuse_unknown(names: list[str]) -> None:
    if names:
        raise UsageError("the model has unknown tensors", why=listed(sorted(names), _SHOWN), hint=ANOTHER_WAY)


def _check_shape(tensor: OutputTensor, dimensions: Mapping[str, tuple[int, ...]]) -> None:
    module, _, end = tensor.name.rpartition(".")
    required = dimensions.get(module.rpartition(".")[2])
    shape, required = tensor.source.shape, required[:1] if required and end == "bias" else required
    if required is not None and shape != required:
        raise BadModelError(
            f"tensor {tensor.source.name!r} has the shape {list(shape)}", why=f"config.json describes {list(required)}"
        )


# ---- writing: gguf-py's writer gives the same bytes, and takes eight times as long for a large vocabulary


class SignedInt(int):
    """Integer that is written as signed (GGUF's i32)."""


def write_model(
    target: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[OutputTensor],
    on_progress: OnProgress = lambda done, total: None,
    rules: Callable[[Header], None] = check,
) -> int:
    """Write and verify a file under a temporary name, then rename it to the target; return its size in bytes.

    Args:
        metadata: key -> string, number, boolean, bytes as an array, or a list of strings or numbers.
        on_progress: called with (bytes written, total bytes).
        rules: raises BadModelError for an invalid header.

    Raises:
        DiskFullError, ResourceError: the file can't be written.
        BadModelError: the model breaks one of llama.cpp's rules, or a tensor is damaged.
    """
    header = header_bytes(metadata, tensors)
    total = len(header) + sum(padded(tensor.n_bytes) for tensor in tensors)
    remove_leftovers(target.parent)
    require_room(target, total)
    with arriving(target, total) as path:
        with path.open("wb") as file:
            file.write(header)
            done = len(header)
            for tensor in tensors:
                for n_bytes in _write_tensor(file, tensor):
                    done += n_bytes
                    on_progress(done, total)
        _verify(path, target, tensors, total, rules)
    return total


def _write_tensor(file: BinaryIO, tensor: OutputTensor) -> Iterable[int]:
    """Write a tensor; yield the number of bytes of each step."""
    written = 0
    for chunk in tensor.data():
        block = np.ascontiguousarray(chunk)
        file.write(block.reshape(-1).view(np.uint8).data)
        written += block.nbytes
        yield block.nbytes
    assert written == tensor.n_bytes, f"{tensor.name} has {written} bytes, not {tensor.n_bytes}"
    padding = padded(written) - written
    file.write(b"\0" * padding)
    yield padding


def _verify(
    path: Path, target: Path, tensors: Sequence[OutputTensor], total: int, rules: Callable[[Header], None]
) -> None:
    """Compare the header with the plan, and check it; raise BadModelError for a difference or a broken rule."""
    header = read_header(path)
    written = [(row.name, row.shape, row.type) for row in header.tensors]
    if written != [(tensor.name, tensor.shape, tensor.type) for tensor in tensors] or header.file_size != total:
        raise BadModelError(f"{str(target)!r} was not written correctly", hint="run the same command again")
    rules(replace(header, path=target))  # messages name the target
    if rules is check:
        check_vocabulary(header)


def header_bytes(metadata: Mapping[str, Any], tensors: Sequence[OutputTensor]) -> bytes:
    """Return the bytes before the tensors' data, padded to the alignment.

    Raises BadModelError if a number does not fit its type.
    """
    out = bytearray(b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        try:
            out += _string(key) + _value(value)
        except (struct.error, OverflowError):
            raise BadModelError(f"{key} is {str(value)[:80]}, which does not fit its type") from None
    offset = 0
    for tensor in tensors:
        shape = tensor.shape
        out += _string(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        out += struct.pack("<IQ", TENSOR_TYPES[tensor.type].number, offset)
        offset += padded(tensor.n_bytes)
    return bytes(out) + b"\0" * (padded(len(out)) - len(out))


def _string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, SignedInt):
        return struct.pack("<Ii", _I32, value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bytes):
        return struct.pack("<IIQ", _ARRAY, _U8, len(value)) + value
    return struct.pack("<I", _ARRAY) + _array(value)


def _array(values: Sequence[Any]) -> bytes:
    if values and isinstance(values[0], str | bytes):
        return struct.pack("<IQ", _STRING, len(values)) + b"".join(map(_string, values))
    number, code = (_F32, "f") if values and isinstance(values[0], float) else (_I32, "i")
    return struct.pack(f"<IQ{len(values)}{code}", number, len(values), *values)

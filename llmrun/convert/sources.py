"""Lazy sources of a tensor's values: rows of a file, optionally reordered or shifted.

Rows are read only while the chunks are iterated, some at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from llmrun.convert.encode import FLOAT_TYPES, to_float32
from llmrun.convert.safetensors import CheckpointTensor
from llmrun.errors import BadModelError

if TYPE_CHECKING:
    from llmrun.convert.encode import Array, Floats

CHUNK_ELEMENTS = 4 * 1024 * 1024

Chunks = Callable[[int], "Iterator[Array]"]


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Values of a tensor."""

    name: str  # in the checkpoint
    kind: str  # type of the chunks' elements, one of encode.FLOAT_TYPES
    shape: tuple[int, ...]  # in PyTorch's order, the contiguous dimension last
    chunks: Chunks  # yields groups of rows; the size of a group is a multiple of the argument


def chunk_rows(shape: tuple[int, ...], multiple: int = 1) -> int:
    return max(1, CHUNK_ELEMENTS // max(prod(shape[1:]) * multiple, 1)) * multiple


def stored_source(tensor: CheckpointTensor) -> TensorSource:
    """Return the source of a stored tensor, unchanged."""
    shape = tensor.shape or (1,)
    whole = replace(tensor, shape=shape)

    def chunks(multiple: int) -> Iterator[Array]:
        step = chunk_rows(shape, multiple)
        for start in range(0, shape[0], step):
            yield whole.rows(start, min(start + step, shape[0]))

    return TensorSource(tensor.name, tensor.kind, shape, chunks)


def require_floats(source: TensorSource) -> TensorSource:
    """Return the source. Raises BadModelError if its elements are not floating-point numbers."""
    if source.kind not in FLOAT_TYPES:
        raise BadModelError(
            f"tensor {source.name!r} holds {source.kind} numbers",
            why="weights must be floating-point numbers, unless config.json describes their quantization",
        )
    return source


def array_source(name: str, values: Floats) -> TensorSource:
    return TensorSource(name, "F32", values.shape, lambda multiple: iter((values,)))


def permute_heads(source: TensorSource, n_heads: int) -> TensorSource:
    """Reorder query or key rows for ggml's rotation: pairs are adjacent, not half a head apart.

    Raises BadModelError if the rows don't divide into `n_heads` heads of even length.
    """
    n_rows = source.shape[0]
    if n_heads < 1 or n_rows % (2 * n_heads):
        raise BadModelError(
            f"tensor {source.name!r} has {n_rows} rows", why=f"they don't divide into {n_heads} heads of even length"
        )
    head = n_rows // n_heads

    def chunks(multiple: int) -> Iterator[Array]:
        assert multiple == 1, "rows are reordered once"
        for chunk in source.chunks(head):
            halves = chunk.reshape(len(chunk) // head, 2, head // 2, *chunk.shape[1:])
            yield halves.swapaxes(1, 2).reshape(chunk.shape)

    return replace(source, chunks=chunks)


def stack_experts(name: str, experts: Sequence[TensorSource]) -> TensorSource:
    """Stack the same matrix of all experts into one tensor.

    Raises BadModelError if the matrices differ in shape or type.
    """
    first = experts[0]
    other = next((one for one in experts if (one.shape, one.kind) != (first.shape, first.kind)), None)
    if other is not None:
        raise BadModelError(f"the experts' tensors {first.name!r} and {other.name!r} differ in shape or type")

    def chunks(multiple: int) -> Iterator[Array]:
        for one in experts:
            yield from one.chunks(multiple)

    return TensorSource(name, first.kind, (len(experts), *first.shape), chunks)


def take_half(source: TensorSource, number: int) -> TensorSource:
    """Take the upper (0) or lower (1) half of each expert's rows.

    Raises BadModelError if the tensor is not three-dimensional with an even number of rows.
    """
    if len(source.shape) != 3 or source.shape[1] % 2:
        raise BadModelError(f"tensor {source.name!r} has the shape {list(source.shape)}")
    n_experts, n_rows, n_columns = source.shape[0], source.shape[1] // 2, source.shape[2]

    def chunks(multiple: int) -> Iterator[Array]:
        for chunk in source.chunks(multiple):
            yield chunk[:, number * n_rows : (number + 1) * n_rows]

    return replace(source, shape=(n_experts, n_rows, n_columns), chunks=chunks)


def map_values(source: TensorSource, function: Callable[[Floats], Floats]) -> TensorSource:
    """Apply a function to every chunk, in float32."""

    def chunks(multiple: int) -> Iterator[Array]:
        for chunk in source.chunks(multiple):
            yield function(to_float32(chunk, source.kind))

    return replace(source, kind="F32", chunks=chunks)

"""The tensors of the GGUF file: name, type, size and source of each.

Owns the mapping from a checkpoint to a file; must not know how either is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from llmrun.convert.architectures import (
    ANOTHER_WAY,
    Family,
    bare_name,
    expert_tensors,
    half_tensors,
    is_vision,
    required_tensors,
)
from llmrun.convert.config import Config
from llmrun.convert.encode import all_finite, encode, to_float32
from llmrun.convert.hyperparameters import Shape
from llmrun.convert.sources import (
    TensorSource,
    array_source,
    map_values,
    permute_heads,
    require_floats,
    stack_experts,
    take_half,
)
from llmrun.errors import BadModelError, UsageError, listed
from llmrun.gguf.types import TENSOR_TYPES

if TYPE_CHECKING:
    from llmrun.convert.encode import Array

MAX_NAME_BYTES = 63  # GGML_MAX_NAME without the null byte
_ALWAYS_F32 = ("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight")
_HEAD = "lm_head.weight"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """Tensor of the file."""

    name: str
    kind: str  # F32, F16, BF16 or Q8_0
    source: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions in ggml's order, the contiguous one first."""
        return tuple(reversed(self.source.shape))

    @property
    def n_bytes(self) -> int:
        kind = TENSOR_TYPES[self.kind]
        return prod(self.source.shape) // kind.block * kind.block_bytes

    def data(self) -> Iterator[Array]:
        """Yield the encoded data, some rows at a time.

        Raises BadModelError if a value is infinite or NaN, or becomes infinite in the output type.
        """
        for chunk in self.source.chunks(1):
            if self.source.kind == self.kind:
                encoded = chunk
            else:
                values = to_float32(chunk, self.source.kind)
                self._require_finite(values, "F32", "")
                encoded = encode(values, self.kind)
            self._require_finite(encoded, self.kind, "use --type bf16" if self.kind == "F16" else "use --type f32")
            yield encoded

    def _require_finite(self, values: Array, kind: str, hint: str) -> None:
        if all_finite(values, kind):
            return
        if hint and self.source.kind != self.kind:
            raise BadModelError(f"tensor {self.source.name!r} has values too large for {kind}", hint=hint)
        raise BadModelError(
            f"tensor {self.source.name!r} has infinite or NaN values",
            why="the model is damaged, or its training went wrong",
        )


def plan_tensors(
    sources: Mapping[str, TensorSource], family: Family, config: Config, shape: Shape, kind: str
) -> list[OutputTensor]:
    """Return the tensors of the file, in its order.

    Args:
        sources: checkpoint name -> values.
        kind: type of the matrices.

    Raises:
        BadModelError: a tensor is missing, or does not fit the shape that config.json describes.
        UsageError: there are unknown tensors.
    """
    import numpy as np

    bare = _bare_sources(sources, family)
    n_vision = sum(is_vision(name, family) for name in sources)
    if n_vision:
        shape.notes.append(f"the vision part ({n_vision} tensors) is left out: the file takes text only")
    tied = family.tied or config.flag("tie_word_embeddings")
    head = None if family.tied else bare.get(_HEAD)
    if tied and head is not None and _is_same(head, bare.get(embeddings_name(family))):
        head = None
    factors = {name: np.array(values, dtype=np.float32) for name, values in shape.factors.items()}
    planned = [output_tensor(name, array_source(name, values), kind) for name, values in factors.items()]
    taken = {_HEAD} if family.name != "bert" else set()
    for hf_name, gguf_name in required_tensors(family, shape.n_layers).items():
        planned.append(_planned(bare, hf_name, "weight", gguf_name, family, shape, kind))
        taken.add(f"{hf_name}.weight")
        if f"{hf_name}.bias" in bare:
            planned.append(_planned(bare, hf_name, "bias", gguf_name, family, shape, kind))
            taken.add(f"{hf_name}.bias")
    for gguf_name, parts in expert_tensors(family, shape.n_layers, shape.n_experts):
        experts = stack_experts(gguf_name, [_found(bare, name, family, shape) for name in parts])
        planned.append(output_tensor(gguf_name, experts, kind))
        taken.update(parts)
    for hf_name, two in half_tensors(family, shape.n_layers):
        both = _found(bare, hf_name, family, shape)
        planned += [output_tensor(gguf_name, take_half(both, number), kind) for number, gguf_name in enumerate(two)]
        taken.add(hf_name)
    if head is not None:
        planned.append(output_tensor("output.weight", head, kind))
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
    found = next((s for name, s in sources.items() if bare_name(name, family) == embeddings_name(family)), None)
    if found is None or len(found.shape) != 2 or not found.shape[0]:
        raise BadModelError("the model has no embeddings", why=f"there is no tensor {embeddings_name(family)!r}")
    return found.shape[0]


def _is_same(one: TensorSource, other: TensorSource | None) -> bool:
    import numpy as np

    if other is None or (one.shape, one.kind) != (other.shape, other.kind):
        return False
    return all(map(np.array_equal, one.chunks(1), other.chunks(1)))


def _planned(
    bare: Mapping[str, TensorSource], hf_name: str, end: str, gguf_name: str, family: Family, shape: Shape, kind: str
) -> OutputTensor:
    import numpy as np

    source = _found(bare, f"{hf_name}.{end}", family, shape)
    if family.permutes and hf_name.endswith(("q_proj", "k_proj")):
        source = permute_heads(source, shape.n_heads if hf_name.endswith("q_proj") else shape.n_kv_heads)
    if family.norm_shift and hf_name.endswith("norm"):
        by = np.float32(family.norm_shift)
        source = map_values(source, lambda values: values + by)
    return output_tensor(f"{gguf_name}.{end}", source, kind)


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


def output_tensor(name: str, source: TensorSource, kind: str) -> OutputTensor:
    """Choose a tensor's type: float32 for vectors and norms, float16 if rows don't divide into blocks, else `kind`."""
    assert len(name) <= MAX_NAME_BYTES, "the tables hold short names"
    if len(source.shape) < 2 or name.endswith(_ALWAYS_F32):
        return OutputTensor(name, "F32", source)
    if source.shape[-1] % TENSOR_TYPES[kind].block:
        return OutputTensor(name, "F16", source)
    return OutputTensor(name, kind, source)


def _refuse_unknown(names: list[str]) -> None:
    if names:
        raise UsageError("the model has unknown tensors", why=listed(sorted(names), _SHOWN), hint=ANOTHER_WAY)


def _check_shape(tensor: OutputTensor, dimensions: Mapping[str, tuple[int, ...]]) -> None:
    module, _, end = tensor.name.rpartition(".")
    required = dimensions.get(module.rpartition(".")[2])
    found, required = tensor.source.shape, required[:1] if required and end == "bias" else required
    if required is not None and found != required:
        raise BadModelError(
            f"tensor {tensor.source.name!r} has the shape {list(found)}", why=f"config.json describes {list(required)}"
        )

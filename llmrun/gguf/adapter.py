"""Headers of LoRA adapters, and llama.cpp's rules for them, checked before a model is loaded.

An adapter has two matrices for each matrix W of the model that it changes: W x becomes W x + scale B (A x).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from llmrun.errors import BadModelError, UsageError
from llmrun.gguf.header import Header, Tensor
from llmrun.gguf.types import WEIGHT_TYPES

_A, _B = ".lora_a", ".lora_b"
_IGNORED = "_norm.weight"  # by llama.cpp
_INVOCATION = "adapter.alora.invocation_tokens"
_EMBEDDINGS = "token_embd.weight"


class LoraPair(NamedTuple):
    """The matrices of one tensor of the model, with shapes in ggml's order; those of experts are stacked."""

    a: Tensor  # [input, rank]; for embeddings [rank, input]
    b: Tensor  # [rank, output]

    @property
    def ranks(self) -> tuple[int, int]:
        """The ranks of both matrices, equal in a valid file."""
        return self._a[1], _shape(self.b)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the model's tensor must have."""
        return self._a[0], *_shape(self.b)[1:]

    @property
    def _a(self) -> tuple[int, ...]:
        first, second, *rest = _shape(self.a)
        return (second, first) if self.a.name == _EMBEDDINGS + _A else (first, second, *rest)


@dataclass(frozen=True)
class AdapterFacts:
    """An adapter's file."""

    header: Header
    pairs: Mapping[str, LoraPair]  # name of the model's tensor -> its matrices
    alpha: float  # alpha / rank scales the change; 0 is no scaling

    @property
    def ranks(self) -> tuple[int, ...]:
        """The distinct ranks of the matrices, in ascending order."""
        return tuple(sorted({pair.ranks[0] for pair in self.pairs.values()}))


def is_adapter(header: Header) -> bool:
    return header.text("general.type") == "adapter"


def adapter_facts(header: Header) -> AdapterFacts:
    """Return the facts of an adapter's header.

    Raises:
        UsageError: the file is a model.
        BadModelError: the file is an adapter of another kind, or damaged.
    """
    name = header.path.name
    if not is_adapter(header):
        hint = "llmrun convert makes one of a PEFT folder; llmrun show says what a file is"
        raise UsageError(f"{name!r} is not a LoRA adapter", why="general.type is not 'adapter'", hint=hint)
    adapter_type = header.text("adapter.type")
    if adapter_type != "lora":
        raise BadModelError(f"{name!r} can't be used", why=f"it is an adapter of the type {adapter_type!r}, not 'lora'")
    if _INVOCATION in header.metadata:
        raise BadModelError(
            f"{name!r} can't be used", why="it is an activated LoRA, which applies after certain tokens only"
        )
    alpha = header.number("adapter.lora.alpha")
    if alpha is None:
        stated = header.metadata.get("adapter.lora.alpha")
        _damaged(header, f"'adapter.lora.alpha' is {'missing' if stated is None else repr(stated)}")
    return AdapterFacts(header, _pairs(header), float(alpha))


def _pairs(header: Header) -> dict[str, LoraPair]:
    tensors = {tensor.name: tensor for tensor in header.tensors}
    names = [name[: -len(_A)] for name in tensors if name.endswith((_A, _B))]
    pairs: dict[str, LoraPair] = {}
    for name in dict.fromkeys(names):
        if name + _A not in tensors or name + _B not in tensors:
            _damaged(header, f"tensor {name!r} has only one of two matrices")
        pairs[name] = pair = LoraPair(tensors[name + _A], tensors[name + _B])
        if pair.ranks[0] != pair.ranks[1] or pair.a.shape[2:] != pair.b.shape[2:]:
            _damaged(header, f"the matrices of {name!r} are {_words(pair.a.shape)} and {_words(pair.b.shape)}")
    other = [name for name in tensors if not name.endswith((_A, _B, _IGNORED))]
    if other:
        _damaged(header, f"tensor {other[0]!r} is not a part of a LoRA adapter")
    wrong = next((tensor for tensor in header.tensors if tensor.type not in WEIGHT_TYPES), None)
    if wrong:
        _damaged(header, f"tensor {wrong.name!r} has the type {wrong.type}, which is not for weights")
    if not pairs:
        _damaged(header, "it changes nothing")
    return pairs


def _damaged(header: Header, why: str) -> NoReturn:
    hint = "convert it again from its PEFT folder: llmrun convert FOLDER --base MODEL"
    raise BadModelError(f"{header.path.name!r} is not an adapter that can be used", why=why, hint=hint)


def check_fits(adapter: AdapterFacts, model: Header) -> None:
    """Check that an adapter fits a model.

    Raises:
        UsageError: the adapter does not fit; names the model that it was made for.
    """
    why = _misfit(adapter, model)
    if why:
        header = adapter.header
        base = header.base_model
        file = shlex.quote(str(header.path))
        hint = f"llmrun show {file} tells what it was made for"
        if base:
            why, hint = f"it was made for {base}; {why}", f"llmrun run {shlex.quote(base)} --lora {file}"
        raise UsageError(f"the adapter {header.path.name} does not fit {model.path.name}", why=why, hint=hint)


def ties_embeddings(model: Header) -> bool:
    """Return whether a model's output matrix is its embeddings."""
    return not any(tensor.name == "output.weight" for tensor in model.tensors)


def _misfit(adapter: AdapterFacts, model: Header) -> str:
    """Return the reason for a misfit by the rules of llama_adapter_lora_init_impl(); "" if the adapter fits."""
    if adapter.header.architecture != model.architecture:
        return f"it is for {adapter.header.architecture!r} models, this one is {model.architecture!r}"
    if _EMBEDDINGS in adapter.pairs and ties_embeddings(model):
        return "it changes the embeddings, which are this model's output matrix too: llama.cpp can't compute that"
    tensors = {tensor.name: tensor for tensor in model.tensors}
    for name, pair in adapter.pairs.items():
        if name not in tensors:
            return f"the model has no tensor {name!r}"
        required = tuple(reversed(pair.shape)) if name == _EMBEDDINGS else pair.shape
        if required != tensors[name].shape:
            return f"its {name!r} is {_words(required)}, the model's {_words(tensors[name].shape)}"
    return ""


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Return ggml's shape, in which a vector is a matrix of one row."""
    return tensor.shape if len(tensor.shape) > 1 else (*tensor.shape, 1)


def _words(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)

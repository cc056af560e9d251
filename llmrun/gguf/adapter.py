"""What the header of a LoRA adapter's file says, and whether it fits a model.

Owns llama.cpp's rules for adapters, so that a wrong file is refused before a model is loaded; must not know how they
are chosen. An adapter has two matrices for each of the model's that it changes: W x becomes W x + scale B (A x).
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
    """The matrices of one tensor of the model.

    Attributes:
        a: its shape in ggml's order is [input, rank], of embeddings [rank, input]; of experts one behind the other.
        b: [rank, output].
    """

    a: Tensor
    b: Tensor

    @property
    def ranks(self) -> tuple[int, int]:
        """Of both matrices; a file that can be used has twice the same."""
        return self._a[1], _shape(self.b)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """What the model's tensor has to have."""
        return self._a[0], *_shape(self.b)[1:]

    @property
    def _a(self) -> tuple[int, ...]:
        first, second, *rest = _shape(self.a)
        return (second, first) if self.a.name == _EMBEDDINGS + _A else (first, second, *rest)


@dataclass(frozen=True)
class AdapterFacts:
    """What an adapter's file says.

    Attributes:
        header: of the file.
        pairs: name of the model's tensor -> the matrices that change it.
        alpha: by what the change is multiplied, divided by the rank; 0 for neither.
    """

    header: Header
    pairs: Mapping[str, LoraPair]
    alpha: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the matrices, each once, the smallest first."""
        return tuple(sorted({pair.ranks[0] for pair in self.pairs.values()}))


def is_adapter(header: Header) -> bool:
    """Whether a file is an adapter and not a model."""
    return header.text("general.type") == "adapter"


def adapter_facts(header: Header) -> AdapterFacts:
    """Make sense of an adapter's header.

    Raises:
        UsageError: it is a model.
        BadModelError: it is an adapter of another kind, or damaged.
    """
    name = header.path.name
    if not is_adapter(header):
        hint = "llmrun convert makes one of a PEFT folder; llmrun show says what a file is"
        raise UsageError(f"{name!r} is not a LoRA adapter", why="general.type is not 'adapter'", hint=hint)
    kind = header.text("adapter.type")
    if kind != "lora":
        raise BadModelError(f"{name!r} can't be used", why=f"it is an adapter of the type {kind!r}, not 'lora'")
    if _INVOCATION in header.metadata:
        raise BadModelError(
            f"{name!r} can't be used", why="it is an activated LoRA: it counts behind certain tokens only"
        )
    alpha = header.metadata.get("adapter.lora.alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < float("inf"):
        _damaged(header, f"'adapter.lora.alpha' is {'missing' if alpha is None else repr(alpha)}")
    return AdapterFacts(header, _pairs(header), float(alpha))


def _pairs(header: Header) -> dict[str, LoraPair]:
    found = {tensor.name: tensor for tensor in header.tensors}
    names = [name[: -len(_A)] for name in found if name.endswith((_A, _B))]
    pairs: dict[str, LoraPair] = {}
    for name in dict.fromkeys(names):
        if name + _A not in found or name + _B not in found:
            _damaged(header, f"tensor {name!r} has only one of two matrices")
        pairs[name] = pair = LoraPair(found[name + _A], found[name + _B])
        if pair.ranks[0] != pair.ranks[1] or pair.a.shape[2:] != pair.b.shape[2:]:
            _damaged(header, f"the matrices of {name!r} are {_words(pair.a.shape)} and {_words(pair.b.shape)}")
    other = [name for name in found if not name.endswith((_A, _B, _IGNORED))]
    if other:
        _damaged(header, f"tensor {other[0]!r} is not a part of a LoRA adapter")
    wrong = next((tensor for tensor in header.tensors if tensor.type not in WEIGHT_TYPES), None)
    if wrong:
        _damaged(header, f"tensor {wrong.name!r} has the type {wrong.type}, which is none for weights")
    if not pairs:
        _damaged(header, "it changes nothing")
    return pairs


def _damaged(header: Header, why: str) -> NoReturn:
    hint = "convert it again from its PEFT folder: llmrun convert FOLDER --base MODEL"
    raise BadModelError(f"{header.path.name!r} is not an adapter that can be used", why=why, hint=hint)


def check_fits(adapter: AdapterFacts, model: Header) -> None:
    """See that an adapter was made for a model like this.

    Raises:
        UsageError: it was not; says for which.
    """
    why = _why_not(adapter, model)
    if why:
        header = adapter.header
        base = header.base_model
        file = shlex.quote(str(header.path))
        hint = f"llmrun show {file} tells what it was made for"
        if base:
            why, hint = f"it was made for {base}; {why}", f"llmrun run {shlex.quote(base)} --lora {file}"
        raise UsageError(f"the adapter {header.path.name} does not fit {model.path.name}", why=why, hint=hint)


def ties_embeddings(model: Header) -> bool:
    """Whether a model's output matrix is its embeddings."""
    return not any(tensor.name == "output.weight" for tensor in model.tensors)


def _why_not(adapter: AdapterFacts, model: Header) -> str:
    """Why it does not fit; "" where it does. llama.cpp's rules: llama_adapter_lora_init_impl()."""
    if adapter.header.architecture != model.architecture:
        return f"it is for {adapter.header.architecture!r} models, this one is {model.architecture!r}"
    if _EMBEDDINGS in adapter.pairs and ties_embeddings(model):
        return "it changes the embeddings, which are this model's output matrix too: llama.cpp can't compute that"
    known = {tensor.name: tensor for tensor in model.tensors}
    for name, pair in adapter.pairs.items():
        if name not in known:
            return f"the model has no tensor {name!r}"
        wanted = tuple(reversed(pair.shape)) if name == _EMBEDDINGS else pair.shape
        if wanted != known[name].shape:
            return f"its {name!r} is {_words(wanted)}, the model's {_words(known[name].shape)}"
    return ""


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """As ggml has it: a vector is a matrix of one row."""
    return tensor.shape if len(tensor.shape) > 1 else (*tensor.shape, 1)


def _words(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)

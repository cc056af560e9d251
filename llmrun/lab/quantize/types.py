"""Types of weights: their names, llama.cpp's numbers, their cost, the best 4-bit type of a machine, a faster copy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from llmrun.errors import UsageError, did_you_mean
from llmrun.gguf import types
from llmrun.gguf.header import Header, Tensor
from llmrun.gguf.types import FILE_TYPES
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import kernel_types, repacked_types
from llmrun.planning.predict import predict, work_of
from llmrun.protocol.jobs.machine import MachineSpeed

ALIASES = {
    "INT8": "Q8_0", "Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "FP16": "F16", "FP32": "F32",
    "MXFP4": "MXFP4_MOE",
}  # fmt: skip
BEST_4_BIT = "INT4"
"""Name for the best 4-bit type of this machine and model, see best_4_bit()."""

UNQUANTIZED = frozenset({"F32", "BF16", "F16"})

NEED_IMATRIX = frozenset({
    "IQ3_XS", "IQ3_XXS", "Q2_K_S", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S",
})  # fmt: skip
"""Mixes that llama.cpp refuses without an importance matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTypes:
    """The types that a user names for some tensors or for all; names are keys of TENSOR_TYPES."""

    overrides: tuple[tuple[str, str], ...] = ()  # (regular expression, type); the first match in a tensor's name counts
    output_type: str = ""  # of the output matrix; "" for that of the mix
    embedding_type: str = ""  # of the token embedding
    pure: bool = False  # every matrix gets the same type
    keeps_output: bool = False  # the output matrix stays unchanged

    def tensor_types(self) -> dict[str, Any]:
        """Return these fields, also of a subclass."""
        return {field.name: getattr(self, field.name) for field in fields(TensorTypes)}

    @property
    def flags(self) -> list[str]:
        """The options that were given."""
        flags = ("--tensor-type", "--output-type", "--embedding-type", "--pure", "--keep-output")
        return [flag for flag, value in zip(flags, self.tensor_types().values(), strict=True) if value]


TENSOR_TYPES = {name: types.TENSOR_TYPES[name] for name in types.WEIGHT_TYPES}
"""Tensor types that ggml can quantize to, by name."""

# Nanoseconds per element on one core of 2024, without and with an importance matrix.
_COST: dict[str, tuple[float, float]] = {
    "F32": (0.5, 0.5), "F16": (1.4, 1.4), "BF16": (0.4, 0.4), "Q8_0": (3.5, 3.5), "Q6_K": (27, 27), "Q5_K": (50, 110),
    "Q5_1": (2.1, 104), "Q5_0": (2.5, 23), "Q4_K": (59, 106), "Q4_1": (1.4, 104), "Q4_0": (1.5, 23),
    "IQ4_NL": (195, 195), "IQ4_XS": (195, 195), "MXFP4": (4.7, 4.7), "NVFP4": (19, 19), "Q3_K": (10, 33),
    "IQ3_S": (280, 280), "IQ3_XXS": (420, 420), "Q2_K": (53, 124), "IQ2_S": (190, 190), "IQ2_XS": (1050, 1050),
    "IQ2_XXS": (400, 400), "Q2_0": (4, 4), "TQ2_0": (3.5, 3.5), "TQ1_0": (3.5, 3.5), "IQ1_M": (150, 150),
    "IQ1_S": (130, 130), "Q1_0": (4, 4),
}  # fmt: skip
_COPY_COST, _READ_COST = 0.5, 1.0

_K_BLOCK = 256
_SMALL_SHARE = 0.1  # of the weights in rows that don't divide: K-quants are still best


def file_type(text: str) -> str:
    """Parse a name of FILE_TYPES, or BEST_4_BIT.

    Raises:
        UsageError: there is no such type; the hint names the nearest.
    """
    name = text.strip().upper().replace("-", "_")
    name = ALIASES.get(name, name)
    if name in FILE_TYPES or name == BEST_4_BIT:
        return name
    if name == "NVFP4":
        raise UsageError("llama.cpp can read NVFP4, but not write it", hint="MXFP4 or Q4_K_M")
    raise _unknown("type", text, [*FILE_TYPES, *ALIASES, BEST_4_BIT], f"one of {', '.join(FILE_TYPES)}")


def tensor_type(text: str, label: str) -> str:
    """Parse a name of TENSOR_TYPES.

    Args:
        label: text before it in messages, e.g. "--output-type ".

    Raises:
        UsageError: there is no such type of tensors; the hint names the nearest.
    """
    name = text.strip().upper().replace("-", "_")
    if name in TENSOR_TYPES:
        return name
    mix = ALIASES.get(name, name)
    if mix in FILE_TYPES:
        base = mix.rpartition("_")[0]
        hint = f"{label}{base}" if base in TENSOR_TYPES else "name the type of one tensor, e.g. Q4_K"
        raise UsageError(f"{label}{text}: that is a mix of types for a whole file", hint=hint)
    raise _unknown(f"type for {label.strip()}", text, TENSOR_TYPES, f"one of {', '.join(TENSOR_TYPES)}")


def _unknown(kind: str, text: str, names: Iterable[str], otherwise: str) -> UsageError:
    return UsageError(f"there is no {kind} {text!r}", hint=did_you_mean(text.strip(), names) or otherwise)


def cost(elements: int, before: str, after: str, *, weighted: bool = False) -> float:
    """Return the relative time to quantize a tensor.

    Args:
        before, after: types of the tensor.
        weighted: there is an importance matrix.
    """
    if before == after:
        return _COPY_COST * elements
    return (_READ_COST + _COST[after][weighted]) * elements


def is_quantized(tensor_types: Iterable[str]) -> bool:
    """Return whether any of these tensor types is lossy."""
    return any(name not in UNQUANTIZED for name in tensor_types if not name.startswith(("I8", "I16", "I32", "I64")))


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """Type, and the reason for it."""

    type: str
    why: str


def best_4_bit(tensors: Iterable[Tensor], cpu_flags: Collection[str], *, gpu: bool = False) -> TypeChoice:
    """Choose the best 4-bit type by kernel, size and quality.

    K-quants have the best quality for their size, but rows must divide into their blocks of 256: other rows become
    Q5_0 and Q8_0, which are larger. Of the types with blocks of 32, IQ4_NL is better than Q4_0 at the same size, and
    llama.cpp repacks both for fast kernels. Q4_1 has no such kernel for prompts.

    Args:
        tensors: of the model.
        cpu_flags: as in Hardware.
        gpu: a GPU will compute.
    """
    share, rows = _undivided(tensors)
    fast = repacked_types(cpu_flags) | kernel_types(cpu_flags)
    where = "on a GPU" if gpu else "on this processor"
    if share <= _SMALL_SHARE:
        if gpu or "Q4_K" in fast:
            return TypeChoice("Q4_K_M", f"it is the best of the 4-bit types and has fast kernels {where}")
        return TypeChoice("Q4_K_M", "it is the best of the 4-bit types; this processor has fast kernels for none")
    reason = f"rows of {rows} weights don't divide into K-quants' blocks of {_K_BLOCK}, so Q4_K_M would be larger"
    if gpu or "IQ4_NL" in fast:
        return TypeChoice("IQ4_NL", f"{reason}; it is better than Q4_0 at the same size, with fast kernels {where}")
    return TypeChoice("Q4_0", f"{reason}, and without fast kernels Q4_0 is the simplest to unpack")


COPY_TYPE = "Q8_0"
"""Type of a copy that reads prompts faster than a type of slow_prompts(), with hardly any further loss."""


def slow_prompts(type_name: str, cpu_flags: Collection[str]) -> str:
    """Return a warning for a type whose prefill is several times slower than that of its neighbours, else "".

    On x86 ggml has no matrix kernel for blocks of 32 with a minimum: SmolLM2 in Q4_1 reads 290 tokens/s, in Q4_0 800.
    """
    if type_name not in {"Q4_1", "Q5_1"} - kernel_types(cpu_flags) or "avx2" not in cpu_flags:
        return ""
    return f"{type_name} reads prompts at about a third of the speed of Q4_0, IQ4_NL or Q4_K_M on this processor"


def _undivided(tensors: Iterable[Tensor]) -> tuple[float, int]:
    """Return the share of all weights in rows that don't divide into K-quants' blocks, and their commonest length."""
    total, rows = 0, dict[int, int]()
    for tensor in tensors:
        if len(tensor.shape) < 2:
            continue
        total += tensor.n_elements
        if tensor.shape[0] % _K_BLOCK:
            rows[tensor.shape[0]] = rows.get(tensor.shape[0], 0) + tensor.n_elements
    if not rows:
        return 0.0, 0
    return sum(rows.values()) / total, max(rows, key=lambda length: rows[length])


def tensor_bytes(tensor: Tensor, type_name: str) -> int:
    if type_name == tensor.type:
        return tensor.n_bytes
    return tensor.n_elements // TENSOR_TYPES[type_name].block * TENSOR_TYPES[type_name].block_bytes


def unfit(tensors: Mapping[str, Tensor], name: str, type_name: str) -> int:
    """Return the length of a tensor's rows if a type's blocks don't divide it, else 0; 0 for a missing tensor."""
    tensor = tensors.get(name)
    if tensor is None or tensor.shape[0] % TENSOR_TYPES[type_name].block == 0:
        return 0
    return tensor.shape[0]


_WORTHWHILE = 1.3  # ratio of prefill rates


class FastCopy(NamedTuple):
    """The copy, and its speed relative to the original."""

    type: str
    n_bytes: int  # of its weights
    prefill: float  # ratio of prefill rates
    decode: float  # ratio of decode rates


def has_slow_prompts(header: Header, hardware: Hardware) -> bool:
    """Return whether most weights have a type whose prompts are slow on this processor."""
    return not hardware.gpus and bool(slow_prompts(next(iter(header.bytes_per_type), ""), hardware.cpu_flags))


def fast_copy(header: Header, speed: MachineSpeed) -> FastCopy | None:
    """Return the copy in COPY_TYPE; None if it gains little by the measured kernels."""
    tensors = tuple(
        replace(tensor, type=COPY_TYPE, n_bytes=tensor_bytes(tensor, COPY_TYPE)) if len(tensor.shape) > 1 else tensor
        for tensor in header.tensors
    )
    before, after = (predict(work_of(facts), speed) for facts in (header, replace(header, tensors=tensors)))
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    copy = FastCopy(
        COPY_TYPE, n_bytes, after.prefill_rate / before.prefill_rate, after.decode_rate / before.decode_rate
    )
    return copy if copy.prefill >= _WORTHWHILE else None

"""Quantization to a target size: a type for each tensor such that the file fits and the loss is smallest.

The engine's mix job measures the loss of each type per tensor, and a multiple-choice knapsack weighs it against bytes.
The candidates are types with fast kernels: Q4_1 and Q5_1 have none for prompts on x86, Q4_0 is no smaller than IQ4_NL,
and IQ3_S is no smaller than Q3_K but slow to unpack. Types of fewer bits are slow too; they are candidates only with an
importance matrix, for very small files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmrun.errors import UsageError
from llmrun.gguf.header import Header, Tensor
from llmrun.gguf.imatrix import read_imatrix
from llmrun.gguf.reader import padded, read_header
from llmrun.gguf.types import FILE_TYPES
from llmrun.lab.quantize.evaluate import default_text
from llmrun.lab.quantize.job import all_cores
from llmrun.lab.quantize.types import TENSOR_TYPES, UNQUANTIZED, tensor_bytes
from llmrun.planning.hardware import probe
from llmrun.protocol.jobs.mix import MIX, MeasureMix, MixMeasurement
from llmrun.protocol.jobs.quantize import QUANTIZE, Quantize
from llmrun.protocol.sizes import readable_size
from llmrun.runner.client import EngineClient

_MOST_UNITS = 1 << 14


class Option(NamedTuple):
    """Choice for an item."""

    size: int
    cost: float


def choose_options(items: Sequence[Sequence[Option]], capacity: int) -> list[int] | None:
    """Return the index of the chosen option of each item; None if even the smallest don't fit.

    Args:
        items: the options of each item, at minimum one.
        capacity: upper bound of the total size.
    """
    minimum = [min(option.size for option in options) for options in items]
    free = capacity - sum(minimum)
    if free < 0:
        return None
    unit = _unit(items, minimum, free)
    costs = np.zeros(free // unit + 1)  # smallest cost of the items so far, by free units
    choices = []
    for options, smallest in zip(items, minimum, strict=True):
        table = np.full((len(options), len(costs)), np.inf)
        for number, option in enumerate(options):
            units = -(-(option.size - smallest) // unit)
            if units < len(costs):
                table[number, units:] = costs[: len(costs) - units] + option.cost
        choices.append(table.argmin(axis=0).astype(np.uint8))
        costs = table.min(axis=0)
    left, chosen = len(costs) - 1, []
    for options, smallest, choice in zip(reversed(items), reversed(minimum), reversed(choices), strict=True):
        chosen.append(int(choice[left]))
        left -= -(-(options[chosen[-1]].size - smallest) // unit)
    return _fill(items, chosen[::-1], capacity)


def _unit(items: Sequence[Sequence[Option]], minimum: list[int], free: int) -> int:
    """Return the size of a unit: the common divisor of all sizes, or a multiple of it for a large capacity."""
    extras = (option.size - smallest for options, smallest in zip(items, minimum, strict=True) for option in options)
    common = gcd(*extras) or 1
    return common * max(1, -(-free // (common * _MOST_UNITS)))


def _fill(items: Sequence[Sequence[Option]], chosen: list[int], capacity: int) -> list[int]:
    """Spend the rest of the capacity on the upgrades that save most for their size, until none fits."""
    free = capacity - sum(options[number].size for options, number in zip(items, chosen, strict=True))
    while True:
        best = (0.0, 0, 0)
        for item, (options, number) in enumerate(zip(items, chosen, strict=True)):
            now = options[number]
            for better, option in enumerate(options):
                growth, saved = option.size - now.size, now.cost - option.cost
                if growth <= free and saved > 0:
                    best = max(best, (saved / max(growth, 1), item, better))
        if not best[0]:
            return chosen
        _, item, better = best
        free -= items[item][better].size - items[item][chosen[item]].size
        chosen[item] = better


CANDIDATES = ("Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K")
"""Candidate types, the largest first."""
SMALL_CANDIDATES = ("IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS")
"""More candidates for tensors in the importance matrix."""

# Type of most weights -> llama.cpp's mix of that type; other types have a mix of the same name.
_BASES = {"Q6_K": "Q6_K", "Q5_K": "Q5_K_S", "Q4_K": "Q4_K_S", "Q3_K": "Q3_K_S", "MXFP4": "Q4_0"}
_DEFAULT_BASE = "Q8_0"
_NEW_KEYS = 1024  # upper bound of the bytes that llama.cpp adds to the metadata
_TEXT = 16_384  # characters of the measured text at most, some 4,000 tokens
_SECONDS = 60.0
_LAYER = re.compile(r"blk\.\d+\.")


@dataclass(frozen=True, slots=True)
class MixRow:
    """Tensors of one kind, e.g. "ffn_down.weight"."""

    kind: str  # name without the layer
    types: Mapping[str, int]  # type -> number of tensors, in descending order
    n_bytes: int
    divergence: float  # expected contribution, in nats per token


@dataclass(frozen=True, slots=True)
class Mix:
    """Type of each tensor."""

    types: Mapping[str, str]  # tensor -> type of the quantized tensors
    base: str  # a name of gguf.types.FILE_TYPES: the file's type, and that of all other tensors
    n_bytes: int  # upper bound of the file's size; short metadata save some hundred bytes
    divergence: float  # expected Kullback-Leibler divergence from the full model, in nats per token
    table: tuple[MixRow, ...]  # the mix by kind of tensor, the largest first

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """Overrides of QuantizeRequest: one regular expression per tensor, which matches no other."""
        return tuple((f"^{re.escape(name)}$", type_name) for name, type_name in self.types.items())


def choose(
    source: Path,
    target_bytes: int,
    *,
    imatrix: Path | None = None,
    threads: int | None = None,
    text: str | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Mix:
    """Find the best mix for a file of at most `target_bytes`.

    Args:
        source: the model's (first) file.
        imatrix: the importance matrix for the quantization.
        text: the text to measure on; None for evaluate.default_text().
        on_progress: called with the share that is done, 0 to 1; an exception from it stops the engine.

    Raises:
        UsageError: no mix is small enough.
        BadModelError, OutOfMemoryError: the model is damaged, or can't be loaded.
    """
    header = read_header(source)
    threads = threads or all_cores(probe())
    path = header.path.absolute()
    with closing(EngineClient()) as engine:
        candidates = _candidates(header, _quantizable(header, engine), imatrix)
        room = _Room(header, candidates, target_bytes)
        command = MeasureMix(
            model=str(path),
            candidates={
                name: tuple(TENSOR_TYPES[type_name].number for type_name in types)
                for name, types in candidates.items()
                if len(types) > 1
            },
            text=(default_text().content if text is None else text)[:_TEXT],
            imatrix=str(imatrix.absolute()) if imatrix else "",
            threads=threads,
            seconds=_SECONDS,
        )
        measured = engine.do(MIX, command, on_progress)
    return room.mix(measured)


def _quantizable(header: Header, engine: EngineClient) -> list[Tensor]:
    """Return the tensors that llama.cpp would quantize: those whose type changes for one of two bases."""
    changed = set()
    for base in ("Q8_0", "Q4_0"):
        command = Quantize(str(header.path.absolute()), "", FILE_TYPES[base], threads=1, pure=True)
        planned = engine.do(QUANTIZE, command)
        changed |= {tensor.name for tensor in header.tensors if planned.types.get(tensor.name) != tensor.type}
    return [tensor for tensor in header.tensors if tensor.name in changed]


def _candidates(header: Header, tensors: list[Tensor], imatrix: Path | None) -> dict[str, tuple[str, ...]]:
    """Return tensor -> current type, and all candidates that fit its rows and are smaller."""
    important: set[str] = set()
    if imatrix is not None:
        important = set(read_imatrix(imatrix).entries)
    candidates = {}
    for tensor in tensors:
        all_types = CANDIDATES + (SMALL_CANDIDATES if tensor.name in important else ())
        fitting = [type_name for type_name in all_types if tensor.shape[0] % TENSOR_TYPES[type_name].block == 0]
        smaller = [type_name for type_name in fitting if tensor_bytes(tensor, type_name) < tensor.n_bytes]
        half = ["F16"] if smaller and tensor.type == "F32" else []
        candidates[tensor.name] = (tensor.type, *half, *smaller)
    return candidates


class _Room:
    """The bytes available to the tensors of the new file. Raises UsageError if even the smallest types don't fit."""

    def __init__(self, header: Header, candidates: Mapping[str, tuple[str, ...]], target_bytes: int) -> None:
        self._tensors = {tensor.name: tensor for tensor in header.tensors}
        self._candidates = candidates
        self._fixed = header.file_size - header.weight_bytes + _NEW_KEYS
        self._fixed += sum(padded(tensor.n_bytes) for tensor in header.tensors if tensor.name not in candidates)
        self._room = target_bytes - self._fixed
        minimum = self._fixed + sum(min(self._sizes(name)) for name in candidates)
        if minimum > target_bytes:
            raise UsageError(
                f"no mix of types makes {header.path.name!r} as small as {_exact(target_bytes)}",
                why=f"the smallest types that fit its rows take {_exact(minimum)}",
                hint=f"--size {-(-minimum // 10**6)}MB, or choose a smaller model",
            )

    def _sizes(self, name: str) -> list[int]:
        return [padded(tensor_bytes(self._tensors[name], type_name)) for type_name in self._candidates[name]]

    def mix(self, measured: MixMeasurement) -> Mix:
        """Return the mix with the smallest measured loss."""
        options = {
            name: [Option(*pair) for pair in zip(sizes, measured.losses.get(name, (0.0,)), strict=True)]
            for name, sizes in zip(self._candidates, map(self._sizes, self._candidates), strict=True)
        }
        numbers = choose_options(list(options.values()), self._room)
        assert numbers is not None
        chosen = {name: options[name][number] for name, number in zip(options, numbers, strict=True)}
        types = {name: self._candidates[name][number] for name, number in zip(options, numbers, strict=True)}
        return Mix(
            types=types,
            base=self._base(types),
            n_bytes=self._fixed + sum(option.size for option in chosen.values()),
            divergence=sum(option.cost for option in chosen.values()),
            table=_table(types, chosen),
        )

    def _base(self, types: Mapping[str, str]) -> str:
        """Return llama.cpp's mix for the type of most weights."""
        weights: Counter[str] = Counter()
        for name, type_name in types.items():
            weights[type_name] += self._tensors[name].n_elements
        type_name = weights.most_common(1)[0][0] if weights else _DEFAULT_BASE
        base = _BASES.get(type_name, type_name)
        return base if base in FILE_TYPES and base not in UNQUANTIZED else _DEFAULT_BASE


def _exact(n_bytes: int) -> str:
    return f"{readable_size(n_bytes)} ({n_bytes:,} bytes)"


def _table(types: Mapping[str, str], chosen: Mapping[str, Option]) -> tuple[MixRow, ...]:
    kinds: dict[str, list[str]] = {}
    for name in types:
        kinds.setdefault(_LAYER.sub("", name), []).append(name)
    rows = [
        MixRow(
            kind,
            dict(Counter(types[name] for name in names).most_common()),
            sum(chosen[name].size for name in names),
            sum(chosen[name].cost for name in names),
        )
        for kind, names in kinds.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.n_bytes))

"""Quantizing to a size: which type each tensor should get so that the file fits and the answers suffer least.

Owns what may be chosen and the choice; the engine measures what each type costs each tensor (engine/mix.py), and
knapsack.py weighs that against bytes. What may be chosen are types with fast kernels: Q4_1 and Q5_1 have none for
prompts on x86, Q4_0 is no smaller than IQ4_NL, and IQ3_S no smaller than Q3_K but slow to unpack. Types of fewer bits
are slow too, so they are there only with an importance matrix, for who wants very small files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import UsageError
from llmrun.gguf.filenames import all_parts
from llmrun.gguf.header import Header, Tensor
from llmrun.gguf.reader import padded, read_header
from llmrun.planning.hardware import probe
from llmrun.protocol.jobs.mix import MIX, MeasureMix, MeasureUpdate, MixMeasurement
from llmrun.protocol.jobs.quantize import QUANTIZE, Quantize
from llmrun.protocol.sizes import readable_size
from llmrun.quantize.evaluate import default_text
from llmrun.quantize.job import all_cores
from llmrun.quantize.knapsack import Option, choose_options
from llmrun.quantize.types import FILE_TYPES, TENSOR_TYPES, UNQUANTIZED, tensor_bytes
from llmrun.runner.runner import Runner

CANDIDATES = ("Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K")
"""Types that a tensor can get, the largest first."""
SMALL_CANDIDATES = ("IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS")
"""The same, only for tensors in the importance matrix."""

# Mixes whose name says what most weights are; of others llama.cpp's name is the type's own.
_BASES = {"Q6_K": "Q6_K", "Q5_K": "Q5_K_S", "Q4_K": "Q4_K_S", "Q3_K": "Q3_K_S", "MXFP4": "Q4_0"}
_USUAL_BASE = "Q8_0"
_NEW_KEYS = 1024  # bytes at most that llama.cpp adds to the metadata
_TEXT = 16_384  # characters that the model reads at most, some 4,000 tokens
_SECONDS = 60.0
_LAYER = re.compile(r"blk\.\d+\.")


@dataclass(frozen=True, slots=True)
class MixRow:
    """Tensors of one kind, e.g. all of "ffn_down.weight".

    Attributes:
        kind: their name without the layer.
        types: type -> how many of them get it, most first.
        n_bytes: of all of them.
        divergence: that they are expected to add, in nats a token.
    """

    kind: str
    types: Mapping[str, int]
    n_bytes: int
    divergence: float


@dataclass(frozen=True, slots=True)
class Mix:
    """Which type each tensor gets.

    Attributes:
        types: tensor -> type, of those that are quantized.
        base: a name of types.FILE_TYPES, which the file calls itself and everything else gets.
        n_bytes: of the file, at most; some hundred bytes less where the metadata are short.
        divergence: Kullback-Leibler divergence from the full model that is to be expected, in nats a token.
        table: the mix by kinds of tensors, the largest first.
    """

    types: Mapping[str, str]
    base: str
    n_bytes: int
    divergence: float
    table: tuple[MixRow, ...]

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """(regular expression, type) for quantize.job.Request: one for each tensor, and no other matches it."""
        return tuple((f"^{re.escape(name)}$", kind) for name, kind in self.types.items())


def choose(
    source: Path,
    target_bytes: int,
    *,
    imatrix: Path | None = None,
    threads: int | None = None,
    text: str | None = None,
    on_update: Callable[[MeasureUpdate], None] = lambda update: None,
) -> Mix:
    """Find the best mix that makes a file of no more than so many bytes.

    Args:
        source: the model's (first) file.
        imatrix: the importance matrix that it will be quantized with.
        threads: None is all cores.
        text: what the model reads to find out which tensors matter; None is evaluate.default_text().
        on_update: how far it is. What it raises ends the engine.

    Raises:
        UsageError: no mix is as small as that.
        BadModelError: the model is damaged.
        OutOfMemoryError: it can't be loaded.
    """
    header = read_header(source)
    threads = threads or all_cores(probe())
    engine = Runner()
    try:
        candidates = _candidates(header, _quantizable(header, engine), imatrix)
        room = _Room(header, candidates, target_bytes)
        command = MeasureMix(
            files=tuple(str(path) for path in _files(header)),
            candidates={
                name: tuple(TENSOR_TYPES[kind].number for kind in kinds)
                for name, kinds in candidates.items()
                if len(kinds) > 1
            },
            text=(default_text().content if text is None else text)[:_TEXT],
            imatrix=str(imatrix.absolute()) if imatrix else "",
            threads=threads,
            seconds=_SECONDS,
        )
        measured = engine.do(MIX, command, on_update)
    finally:
        engine.close()
    return room.mix(measured)


def _files(header: Header) -> list[Path]:
    path = header.path.absolute()
    return [path.with_name(name) for name in all_parts(path.name)]


def _quantizable(header: Header, engine: Runner) -> list[Tensor]:
    """What llama.cpp would quantize: what changes its type when it is asked for either of two."""
    changed = set()
    for base in ("Q8_0", "Q4_0"):
        command = Quantize(str(header.path.absolute()), "", FILE_TYPES[base], threads=1, pure=True)
        planned = engine.do(QUANTIZE, command)
        changed |= {tensor.name for tensor in header.tensors if planned.types.get(tensor.name) != tensor.type}
    return [tensor for tensor in header.tensors if tensor.name in changed]


def _candidates(header: Header, tensors: list[Tensor], imatrix: Path | None) -> dict[str, tuple[str, ...]]:
    """Of each tensor the type that it has, and those that its rows allow and that make it smaller."""
    important: set[str] = set()
    if imatrix is not None:
        from llmrun.gguf.imatrix import read_imatrix

        important = set(read_imatrix(imatrix).entries)
    found = {}
    for tensor in tensors:
        wanted = CANDIDATES + (SMALL_CANDIDATES if tensor.name in important else ())
        fitting = [kind for kind in wanted if tensor.shape[0] % TENSOR_TYPES[kind].block == 0]
        smaller = [kind for kind in fitting if tensor_bytes(tensor, kind) < tensor.n_bytes]
        half = ["F16"] if smaller and tensor.type == "F32" else []
        found[tensor.name] = (tensor.type, *half, *smaller)
    return found


class _Room:
    """How the file's bytes are shared out.

    Raises:
        UsageError: the smallest types need more than there are.
    """

    def __init__(self, header: Header, candidates: Mapping[str, tuple[str, ...]], target_bytes: int) -> None:
        self._tensors = {tensor.name: tensor for tensor in header.tensors}
        self._candidates = candidates
        self._fixed = header.file_size - header.weight_bytes + _NEW_KEYS
        self._fixed += sum(padded(tensor.n_bytes) for tensor in header.tensors if tensor.name not in candidates)
        self._room = target_bytes - self._fixed
        least = self._fixed + sum(min(self._sizes(name)) for name in candidates)
        if least > target_bytes:
            raise UsageError(
                f"no mix of types makes {header.path.name!r} as small as {_exact(target_bytes)}",
                why=f"the smallest that its rows allow takes {_exact(least)}",
                hint=f"--size {-(-least // 10**6)}MB, or choose a smaller model",
            )

    def _sizes(self, name: str) -> list[int]:
        return [padded(tensor_bytes(self._tensors[name], kind)) for kind in self._candidates[name]]

    def mix(self, measured: MixMeasurement) -> Mix:
        """The best mix, by what the types cost."""
        things = {
            name: [Option(*pair) for pair in zip(sizes, measured.losses.get(name, (0.0,)), strict=True)]
            for name, sizes in zip(self._candidates, map(self._sizes, self._candidates), strict=True)
        }
        numbers = choose_options(list(things.values()), self._room)
        assert numbers is not None
        chosen = {name: things[name][number] for name, number in zip(things, numbers, strict=True)}
        types = {name: self._candidates[name][number] for name, number in zip(things, numbers, strict=True)}
        return Mix(
            types=types,
            base=self._base(types),
            n_bytes=self._fixed + sum(option.size for option in chosen.values()),
            divergence=sum(option.cost for option in chosen.values()),
            table=_table(types, chosen),
        )

    def _base(self, types: Mapping[str, str]) -> str:
        """The mix that is nearest to what most weights are."""
        weights: Counter[str] = Counter()
        for name, kind in types.items():
            weights[kind] += self._tensors[name].n_elements
        kind = weights.most_common(1)[0][0] if weights else _USUAL_BASE
        base = _BASES.get(kind, kind)
        return base if base in FILE_TYPES and base not in UNQUANTIZED else _USUAL_BASE


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

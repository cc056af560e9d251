"""The job `mix`: the expected loss of each tensor with each type, in Kullback-Leibler divergence of the predictions.

The loss is the product of two measurements. The first is exact to some per cent: a sample of a tensor's rows is
quantized to each type and back; its error is sum(w * (q - x)^2) / sum(w * x^2), with w the importance of a column: the
relative error of the tensor's output. The second is the sensitivity of the predictions to that error, which differs
between tensors by orders of magnitude: each group of tensors (of one kind, in neighbouring layers) is quantized
coarsely in memory, the model decodes a short text, and its predictions are compared with those of the full model. As
long as errors are small, the divergence is linear in them and adds up over tensors (Malinovskii et al., "Pushing the
Limits of Large Language Model Quantization via the Linearity Theorem", 2024).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np

from llmrun import _native
from llmrun.engine.jobs.sensitivity import Reader
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.llama.quants import F16, F32, Array, Quants
from llmrun.gguf.imatrix import read_imatrix
from llmrun.gguf.reader import read_header
from llmrun.protocol.jobs.mix import MeasureMix, MeasureUpdate, MixMeasurement

_SAMPLE = 1 << 16  # elements of each tensor
_MIN_ROWS = 16
_COARSE = "Q4_0"  # type for groups: fast, and about as coarse as the types that will be chosen
_TOKENS, _MIN_TOKENS = 384, 64  # decoded; fewer with models of more than ...
_SMALL_MODEL = 4 * 10**8  # weights
_ERRORS_SHARE = 0.3  # approximate share of the time
_MIN_DIVERGENCE = 1e-9  # nats; a smaller one is rounding
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")

Report = Callable[[MeasureUpdate], None]


def run(command: MeasureMix, report: Report, flag: _native.CancelFlag) -> MixMeasurement:
    """Measure.

    Raises:
        BadModelError: llama.cpp can't load the model, or it computes invalid numbers.
        OutOfMemoryError: the context does not fit.
    """
    quants = Quants(command.threads)
    weights = Weights(command.files, quants)
    importance = read_imatrix(Path(command.imatrix)).weights() if command.imatrix else {}
    errors, coarse_errors = {}, {}
    for done, (name, kinds) in enumerate(command.candidates.items(), 1):
        errors[name] = weights.errors(name, kinds, importance.get(name))
        coarse_errors[name] = weights.coarse_error(name, importance.get(name))
        report(MeasureUpdate(_ERRORS_SHARE * done / len(command.candidates)))
    model = LlamaModel(command.files[0], 0, flag, repack=False)
    slopes, groups, positions = _slopes(model, command, weights, coarse_errors, report)
    losses = {name: tuple(slopes[name] * error for error in found) for name, found in errors.items()}
    return MixMeasurement(losses, groups, positions)


class Weights:
    """A model's tensors in its files."""

    def __init__(self, files: Iterable[str], quants: Quants) -> None:
        paths = list(files)
        self.quants = quants
        self.tensors = {tensor.name: tensor for tensor in read_header(Path(paths[0])).tensors}
        self.n_elements = sum(tensor.n_elements for tensor in self.tensors.values())
        self._data = [np.memmap(path, np.uint8, "r") for path in paths]

    def kind(self, name: str) -> int:
        return self.quants.numbers[self.tensors[name].type]

    def _stored(self, name: str) -> Array:
        tensor = self.tensors[name]
        return self._data[tensor.part][tensor.offset : tensor.offset + tensor.n_bytes]

    def _sample(self, name: str) -> tuple[Array, Array]:
        """Return an even, deterministic sample of rows, float32 [rows, columns], and the index of each row's matrix."""
        tensor = self.tensors[name]
        columns, rows_of_matrix = tensor.shape[0], (*tensor.shape, 1)[1]
        total = tensor.n_elements // columns
        count = min(total, max(_MIN_ROWS, _SAMPLE // columns))
        chosen = ((np.arange(count) + np.random.default_rng(0).random(count)) * total / count).astype(int)
        data = self._stored(name).reshape(total, -1)[chosen]
        return self.quants.unpack(self.kind(name), data.reshape(-1), columns), chosen // rows_of_matrix

    def errors(self, name: str, kinds: Iterable[int], importance: Array | None, *, helps: bool = True) -> list[float]:
        """Return the relative squared error of a tensor's output with each type.

        Args:
            kinds: ggml's numbers of types.
            importance: float32 for each column of each of the tensor's matrices.
            helps: quantize with the importance, too.
        """
        rows, matrices = self._sample(name)
        columns, own = rows.shape[1], self.kind(name)
        table = np.ones((1, columns), np.float32) if importance is None else importance.reshape(-1, columns)
        parts = []
        for matrix in np.unique(matrices % len(table)):
            parts.append((np.ascontiguousarray(rows[matrices % len(table) == matrix]), table[matrix].copy()))
        size = sum(_weighted(part, weight) for part, weight in parts)

        def error(kind: int) -> float:
            if kind == own:
                return 0.0
            lost = 0.0
            for part, weight in parts:
                rounded = self.quants.rounded(kind, part, None if importance is None or not helps else weight)
                lost += _weighted(rounded - part, weight)
            return lost / (size or 1.0)

        return list(self.quants.run(error, kinds))

    def coarse_error(self, name: str, importance: Array | None) -> float:
        """Return the error with the coarse type of the groups."""
        return self.errors(name, [self.quants.numbers[_COARSE]], importance, helps=False)[0]

    def through_f16(self, name: str, *, coarse: bool = False) -> Array:
        """Return a whole tensor as bytes of F16, optionally rounded to the coarse type."""
        through = self.quants.numbers[_COARSE] if coarse else None
        return self.quants.repack(self.kind(name), self._stored(name), self.tensors[name].shape[0], through, F16)


def _weighted(rows: Array, weight: Array) -> float:
    return float(np.square(rows).sum(axis=0, dtype=np.float64) @ weight)


# ---- sensitivity of the predictions ----------------------------------------------------------------


def _slopes(
    model: LlamaModel, command: MeasureMix, weights: Weights, coarse_errors: dict[str, float], report: Report
) -> tuple[dict[str, float], int, int]:
    """Return each tensor's divergence per relative error, the number of groups, and that of compared positions."""
    n_tokens = max(_MIN_TOKENS, min(_TOKENS, _TOKENS * _SMALL_MODEL // weights.n_elements))
    vocabulary = model.vocabulary
    tokens = vocabulary.with_bos(vocabulary.tokenize(command.text, special=False))
    tokens = tokens[: min(n_tokens, model.n_ctx_train or n_tokens)]
    with closing(Reader(model, tokens, command.candidates, command.threads)) as reader:
        if not reader.predicts:
            return dict.fromkeys(command.candidates, 1.0), 0, 0
        reader.read()  # warms up and finds the tensors
        began = time.monotonic()
        reader.set_reference()
        groups = grouped(sorted(reader.known), int(command.seconds / max(time.monotonic() - began, 1e-3)))
        slopes: dict[str, float] = {}
        for done, names in enumerate(groups, 1):
            divergence = max(_divergence(reader, weights, names), _MIN_DIVERGENCE)
            slopes |= dict.fromkeys(names, divergence / max(sum(coarse_errors[name] for name in names), 1e-12))
            report(MeasureUpdate(_ERRORS_SHARE + (1 - _ERRORS_SHARE) * done / len(groups)))
        unused = dict.fromkeys(command.candidates, min(slopes.values(), default=1.0))
        return unused | slopes, len(groups), reader.positions


def _divergence(reader: Reader, weights: Weights, names: list[str]) -> float:
    """Return the divergence that quantizing a group coarsely adds, beyond that of computing with F16."""
    with reader.swapped({name: weights.through_f16(name, coarse=True) for name in names}, F16, 2):
        divergence = reader.divergence()
    if all(weights.kind(name) in (F32, F16) for name in names):
        return divergence
    with reader.swapped({name: weights.through_f16(name) for name in names}, F16, 2):
        return divergence - reader.divergence()


def grouped(names: Iterable[str], limit: int) -> list[list[str]]:
    """Group tensors of one kind in neighbouring layers, in about `limit` groups, at least one a kind."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        found = _LAYER.fullmatch(name)
        kind, layer = (found[2], int(found[1])) if found else (name, 0)
        kinds.setdefault(kind, []).append((layer, name))
    bands = max(1, limit // max(len(kinds), 1))
    groups = []
    for members in kinds.values():
        members.sort()
        count = min(bands, len(members))
        bounds = [len(members) * band // count for band in range(count + 1)]
        groups += [[name for _, name in members[low:high]] for low, high in pairwise(bounds)]
    return groups

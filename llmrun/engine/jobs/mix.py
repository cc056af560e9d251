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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path

import numpy as np

from llmrun import _native
from llmrun.engine.jobs.file_weights import FileWeights
from llmrun.engine.jobs.scores import logits_at
from llmrun.engine.llama.base import DecodeError, Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.ggml import GgmlTensor
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.llama.quants import F16, F32, Array
from llmrun.errors import BadLogitsError, BadModelError
from llmrun.gguf.header import Tensor
from llmrun.gguf.imatrix import read_imatrix
from llmrun.gguf.reader import read_header
from llmrun.protocol.jobs.mix import MeasureMix, MixMeasurement
from llmrun.protocol.loading import Load

_SAMPLE = 1 << 16  # elements of each tensor
_MIN_ROWS = 16
_COARSE = "Q4_0"  # type for groups: fast, and about as coarse as the types that will be chosen
_TOKENS, _MIN_TOKENS = 384, 64  # decoded; fewer with models of more than ...
_SMALL_MODEL = 4 * 10**8  # weights
_ERRORS_SHARE = 0.3  # approximate share of the time
_MIN_DIVERGENCE = 1e-9  # nats; a smaller one is rounding
_LOGITS = 1 << 24  # maximum floats to compare: 64 MiB
_SKIPPED = 16  # positions at a text's beginning, which have too little context
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")

Report = Callable[[float], None]


def run_mix(command: MeasureMix, report: Report, flag: _native.CancelFlag) -> MixMeasurement:
    """Measure.

    Raises:
        BadModelError: llama.cpp can't load the model, or it computes invalid numbers.
        OutOfMemoryError: the context does not fit.
    """
    weights = Weights(read_header(Path(command.model)), command.threads)
    importance = read_imatrix(Path(command.imatrix)).weights() if command.imatrix else {}
    errors, coarse_errors = {}, {}
    for done, (name, types) in enumerate(command.candidates.items(), 1):
        errors[name] = weights.errors(name, types, importance.get(name))
        coarse_errors[name] = weights.coarse_error(name, importance.get(name))
        report(_ERRORS_SHARE * done / len(command.candidates))
    model = LlamaModel(command.model, 0, flag, repack=False)
    slopes, groups, positions = _slopes(model, command, weights, coarse_errors, report)
    losses = {name: tuple(slopes[name] * error for error in of_tensor) for name, of_tensor in errors.items()}
    return MixMeasurement(losses, groups, positions)


class Weights(FileWeights):
    """A model's tensors by name, and the error of quantizing each."""

    def _sample(self, tensor: Tensor) -> tuple[Array, Array]:
        """Return an even, deterministic sample of rows, float32 [rows, columns], and the index of each row's matrix."""
        columns, rows_of_matrix = tensor.shape[0], (*tensor.shape, 1)[1]
        total = tensor.n_elements // columns
        count = min(total, max(_MIN_ROWS, _SAMPLE // columns))
        chosen = ((np.arange(count) + np.random.default_rng(0).random(count)) * total / count).astype(int)
        data = self.stored(tensor).reshape(total, -1)[chosen]
        return self.quants.unpack(self.type_number(tensor), data.reshape(-1), columns), chosen // rows_of_matrix

    def errors(self, name: str, types: Iterable[int], importance: Array | None, *, helps: bool = True) -> list[float]:
        """Return the relative squared error of a tensor's output with each type.

        Args:
            types: ggml's numbers.
            importance: float32 for each column of each of the tensor's matrices.
            helps: quantize with the importance, too.
        """
        tensor = self.tensors[name]
        rows, matrices = self._sample(tensor)
        columns = rows.shape[1]
        table = np.ones((1, columns), np.float32) if importance is None else importance.reshape(-1, columns)
        parts = []
        for matrix in np.unique(matrices % len(table)):
            parts.append((np.ascontiguousarray(rows[matrices % len(table) == matrix]), table[matrix].copy()))
        size = sum(_weighted(part, weight) for part, weight in parts)

        def error(type_number: int) -> float:
            if type_number == self.type_number(tensor):
                return 0.0
            lost = 0.0
            for part, weight in parts:
                rounded = self.quants.rounded(type_number, part, None if importance is None or not helps else weight)
                lost += _weighted(rounded - part, weight)
            return lost / (size or 1.0)

        return list(self.quants.run(error, types))

    def coarse_error(self, name: str, importance: Array | None) -> float:
        """Return the error with the coarse type of the groups."""
        return self.errors(name, [self.quants.numbers[_COARSE]], importance, helps=False)[0]

    def through_f16(self, name: str, *, coarse: bool = False) -> Array:
        """Return a whole tensor as bytes of F16, optionally rounded to the coarse type."""
        tensor, through = self.tensors[name], self.quants.numbers[_COARSE] if coarse else None
        return self.quants.repack(self.type_number(tensor), self.stored(tensor), tensor.shape[0], through, F16)


def _weighted(rows: Array, weight: Array) -> float:
    return float(np.square(rows).sum(axis=0, dtype=np.float64) @ weight)


# ---- sensitivity of the predictions ----------------------------------------------------------------


def _slopes(
    model: LlamaModel, command: MeasureMix, weights: Weights, coarse_errors: dict[str, float], report: Report
) -> tuple[dict[str, float], int, int]:
    """Return each tensor's divergence per relative error, the number of groups, and that of compared positions."""
    n_elements = sum(tensor.n_elements for tensor in weights.header.tensors)
    n_tokens = max(_MIN_TOKENS, min(_TOKENS, _TOKENS * _SMALL_MODEL // n_elements))
    vocabulary = model.vocabulary
    tokens = vocabulary.with_bos(vocabulary.tokenize(command.text, special=False))
    tokens = tokens[: min(n_tokens, model.n_ctx_train or n_tokens)]
    with closing(Reader(model, tokens, command.candidates, command.threads)) as reader:
        if not reader.predicts:
            return dict.fromkeys(command.candidates, 1.0), 0, 0
        reader.read()  # warms up and finds the tensors
        began = time.monotonic()
        reader.set_reference()
        groups = grouped(sorted(reader.used), int(command.seconds / max(time.monotonic() - began, 1e-3)))
        slopes: dict[str, float] = {}
        for done, names in enumerate(groups, 1):
            divergence = max(_divergence(reader, weights, names), _MIN_DIVERGENCE)
            slopes |= dict.fromkeys(names, divergence / max(sum(coarse_errors[name] for name in names), 1e-12))
            report(_ERRORS_SHARE + (1 - _ERRORS_SHARE) * done / len(groups))
        unused = dict.fromkeys(command.candidates, min(slopes.values(), default=1.0))
        return unused | slopes, len(groups), reader.positions


def _divergence(reader: Reader, weights: Weights, names: list[str]) -> float:
    """Return the divergence that quantizing a group coarsely adds, beyond that of computing with F16."""
    with reader.swapped({name: weights.through_f16(name, coarse=True) for name in names}, F16, 2):
        divergence = reader.divergence()
    if all(weights.type_number(weights.tensors[name]) in (F32, F16) for name in names):
        return divergence
    with reader.swapped({name: weights.through_f16(name) for name in names}, F16, 2):
        return divergence - reader.divergence()


def grouped(names: Iterable[str], limit: int) -> list[list[str]]:
    """Group tensors of one kind in neighbouring layers, in about `limit` groups, at least one a kind."""
    by_name: dict[str, list[tuple[int, str]]] = {}  # without the layer
    for name in names:
        match = _LAYER.fullmatch(name)
        rest, layer = (match[2], int(match[1])) if match else (name, 0)
        by_name.setdefault(rest, []).append((layer, name))
    bands = max(1, limit // max(len(by_name), 1))
    groups = []
    for members in by_name.values():
        members.sort()
        count = min(bands, len(members))
        bounds = [len(members) * band // count for band in range(count + 1)]
        groups += [[name for _, name in members[low:high]] for low, high in pairwise(bounds)]
    return groups


class Reader:
    """A model that decodes the same tokens repeatedly.

    Args:
        names: of the tensors to swap.

    Raises:
        OutOfMemoryError: the context does not fit.

    Attributes:
        positions: number of compared positions.
        predicts: the model predicts text; encoders don't, and can't be read with.
    """

    def __init__(self, model: LlamaModel, tokens: list[int], names: Collection[str], threads: int) -> None:
        self._names = frozenset(names)
        self._tensors: dict[str, dict[int, GgmlTensor]] = {}
        n_vocab, size = model.vocabulary.n_tokens, len(tokens)
        later = range(min(_SKIPPED, size // 2), size)
        scored = later[:: -(-len(later) * n_vocab // _LOGITS)]
        self.positions, self._first = len(scored), scored[0]
        self._batch = [Entry(token, position, 0, position in scored) for position, token in enumerate(tokens)]
        load = Load(model.path, size, n_batch=size, n_ubatch=size, threads=threads)
        # Tensors on a GPU would be copies.
        self._context = LlamaContext(model, load, n_outputs=self.positions, watch=self._watch, on_processor=True)
        self.predicts = self._context.predicts
        self._reference: Array | None = None
        self._probabilities: Array | None = None

    def _watch(self, tensor: GgmlTensor, ask: bool) -> bool:
        """Note the addresses of the tensors; observe no result."""
        for address in filter(None, tensor.src):
            source = GgmlTensor.from_address(address)
            if source.plain_name in self._names and not source.view_src:
                self._tensors.setdefault(source.plain_name, {})[address] = source
        return False

    def close(self) -> None:
        self._context.close()

    def read(self) -> Array:
        """Compute the log-probabilities of all tokens at the compared positions, float32 [positions, vocabulary]."""
        self._context.clear()
        try:
            self._context.decode(self._batch)
        except DecodeError as error:
            raise BadModelError("llama.cpp could not read a text with this model", why=error.why) from None
        rows, columns = self.positions, self._context.vocabulary.n_tokens
        # Rows are adjacent in memory.
        logits = logits_at(self._context.logits(self._first), rows * columns).reshape(rows, columns)
        logits = logits - logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        if not np.isfinite(logits[:, 0]).all():
            raise BadLogitsError("the model computed logits that are not numbers")
        return logits

    def set_reference(self) -> None:
        """Store the model's present predictions for divergence()."""
        self._reference = self.read()
        self._probabilities = np.exp(self._reference)

    def divergence(self) -> float:
        """Return the mean Kullback-Leibler divergence D(reference || model), in nats."""
        assert self._reference is not None
        assert self._probabilities is not None
        difference = self._reference - self.read()
        difference[self._probabilities == 0] = 0
        return float(np.einsum("pv,pv->p", self._probabilities, difference).mean(dtype=np.float64))

    @property
    def used(self) -> frozenset[str]:
        """The tensors that the model has used, and that can be swapped."""
        return frozenset(self._tensors)

    @contextmanager
    def swapped(self, data: Mapping[str, Array], type_number: int, element_bytes: int) -> Iterator[None]:
        """Swap the data of some tensors inside the block.

        Args:
            data: tensor -> all of its elements, contiguous.
            type_number: ggml's number of their type, one without blocks.
        """
        before = []
        for name, array in data.items():
            for tensor in self._tensors[name].values():
                before.append((tensor, tensor.type, tuple(tensor.nb), tensor.data))
                tensor.type, tensor.data = type_number, array.ctypes.data
                for dimension, stride in enumerate(accumulate(tensor.ne[:-1], mul, initial=element_bytes)):
                    tensor.nb[dimension] = stride
        try:
            yield
        finally:
            for tensor, old_type, strides, address in before:
                tensor.type, tensor.data = old_type, address
                for dimension, stride in enumerate(strides):
                    tensor.nb[dimension] = stride

"""Sensitivity of a model's predictions to changes of its matrices, which are swapped in memory.

Owns the decoding and comparison, and ggml's tensors while they are swapped; must not know the new data's meaning. The
model's file and its mapping stay unchanged: a tensor is pointed at other data, and back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from llmrun.engine.llama.base import DecodeError, Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.llama.quants import Array
from llmrun.engine.llama.tensors import GgmlTensor
from llmrun.errors import BadLogitsError, BadModelError
from llmrun.protocol.loading import Load

_LOGITS = 1 << 24  # maximum floats to compare: 64 MiB
_SKIPPED = 16  # positions at a text's beginning, which have too little context


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
        self._found: dict[str, dict[int, GgmlTensor]] = {}
        n_vocab, size = model.vocabulary.n_tokens, len(tokens)
        later = range(min(_SKIPPED, size // 2), size)
        scored = later[:: -(-len(later) * n_vocab // _LOGITS)]
        self.positions, self._first = len(scored), scored[0]
        self._batch = [Entry(token, position, 0, position in scored) for position, token in enumerate(tokens)]
        load = Load(model.path, size, size, n_batch=size, n_ubatch=size, threads=threads)
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
                self._found.setdefault(source.plain_name, {})[address] = source
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
        memory: Any = (ctypes.c_float * (rows * columns)).from_address(self._context.logits(self._first))
        logits = np.frombuffer(memory, np.float32).reshape(rows, columns)
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
    def known(self) -> frozenset[str]:
        """The tensors that the model has used, and that can be swapped."""
        return frozenset(self._found)

    @contextmanager
    def swapped(self, data: Mapping[str, Array], kind: int, element_bytes: int) -> Iterator[None]:
        """Swap the data of some tensors inside the block.

        Args:
            data: tensor -> all of its elements, contiguous.
            kind: ggml's number of their type, one without blocks.
        """
        before = []
        for name, array in data.items():
            for tensor in self._found[name].values():
                before.append((tensor, tensor.type, tuple(tensor.nb), tensor.data))
                tensor.type, tensor.data = kind, array.ctypes.data
                for dimension, stride in enumerate(accumulate(tensor.ne[:-1], mul, initial=element_bytes)):
                    tensor.nb[dimension] = stride
        try:
            yield
        finally:
            for tensor, old_kind, strides, address in before:
                tensor.type, tensor.data = old_kind, address
                for dimension, stride in enumerate(strides):
                    tensor.nb[dimension] = stride

"""How much a model's answers change when some of its matrices do: one matrix is swapped in memory, and it reads again.

Owns the reading and the comparing, and ggml's tensors while they are swapped; must not know what they are swapped for.
Nothing is written to the model's file or its mapping: a tensor is pointed at other data, and back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from llmrun.engine.llama.base import DecodeError, Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.llama.quants import Array
from llmrun.engine.llama.tensors import GgmlTensor
from llmrun.errors import BadLogitsError, BadModelError
from llmrun.protocol.loading import Load

_LOGITS = 1 << 24  # floats that are compared: 64 MiB
_SKIPPED = 16  # positions at a text's beginning, where there is no context to predict from


class Reader:
    """A model that reads the same tokens again and again.

    Args:
        tokens: of a text.
        names: of the tensors that will be swapped.

    Raises:
        OutOfMemoryError: its context does not fit.

    Attributes:
        positions: how many are compared.
        predicts: whether the model predicts text at all; encoders don't, and nothing can be read with them.
    """

    def __init__(self, model: LlamaModel, tokens: list[int], names: Collection[str], threads: int) -> None:
        self._wanted = frozenset(names)
        self._found: dict[str, dict[int, GgmlTensor]] = {}
        n_vocab, size = model.vocabulary.n_tokens, len(tokens)
        later = range(min(_SKIPPED, size // 2), size)
        scored = later[:: -(-len(later) * n_vocab // _LOGITS)]
        self.positions, self._first = len(scored), scored[0]
        self._batch = [Entry(token, position, 0, position in scored) for position, token in enumerate(tokens)]
        load = Load(model.path, size, size, n_batch=size, n_ubatch=size, threads=threads)
        # Tensors elsewhere would be copies.
        self._context = LlamaContext(model, load, n_outputs=self.positions, watch=self._look, on_processor=True)
        self.predicts = self._context.predicts
        self._reference: Array | None = None
        self._probabilities: Array | None = None

    def _look(self, tensor: GgmlTensor, ask: bool) -> bool:
        """Note where the tensors are; no result is asked for."""
        for address in filter(None, tensor.src):
            source = GgmlTensor.from_address(address)
            if source.plain_name in self._wanted and not source.view_src:
                self._found.setdefault(source.plain_name, {})[address] = source
        return False

    def close(self) -> None:
        """Free the context."""
        self._context.close()

    def read(self) -> Array:
        """Log-probabilities of all tokens at the compared positions, float32 [positions, vocabulary]."""
        self._context.clear()
        try:
            self._context.decode(self._batch)
        except DecodeError as error:
            raise BadModelError("llama.cpp could not read a text with this model", why=error.why) from None
        rows, columns = self.positions, self._context.vocabulary.n_tokens
        # Rows lie one after the other.
        memory: Any = (ctypes.c_float * (rows * columns)).from_address(self._context.logits(self._first))
        logits = np.frombuffer(memory, np.float32).reshape(rows, columns)
        logits = logits - logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        if not np.isfinite(logits[:, 0]).all():
            raise BadLogitsError("the model computed logits that are not numbers")
        return logits

    def set_reference(self) -> None:
        """What the model says now is what later readings are compared with."""
        self._reference = self.read()
        self._probabilities = np.exp(self._reference)

    def divergence(self) -> float:
        """Mean Kullback-Leibler divergence of the reference from what the model says now, in nats."""
        assert self._reference is not None
        assert self._probabilities is not None
        difference = self._reference - self.read()
        difference[self._probabilities == 0] = 0
        return float(np.einsum("pv,pv->p", self._probabilities, difference).mean(dtype=np.float64))

    @property
    def known(self) -> frozenset[str]:
        """Tensors that the model has used, and that can be swapped."""
        return frozenset(self._found)

    @contextmanager
    def swapped(self, data: Mapping[str, Array], kind: int, element_bytes: int) -> Iterator[None]:
        """Inside, some tensors hold other numbers.

        Args:
            data: tensor -> all of its elements, contiguous.
            kind: ggml's number of their type, one without blocks.
        """
        before = []
        for name, array in data.items():
            for tensor in self._found[name].values():
                before.append((tensor, tensor.type, tuple(tensor.nb), tensor.data))
                tensor.type, tensor.data = kind, array.ctypes.data
                for dimension, stride in enumerate(_strides(tuple(tensor.ne), element_bytes)):
                    tensor.nb[dimension] = stride
        try:
            yield
        finally:
            for tensor, old_kind, strides, address in before:
                tensor.type, tensor.data = old_kind, address
                for dimension, stride in enumerate(strides):
                    tensor.nb[dimension] = stride


def _strides(shape: tuple[int, ...], element_bytes: int) -> list[int]:
    strides = [element_bytes]
    for length in shape[:-1]:
        strides.append(strides[-1] * length)
    return strides

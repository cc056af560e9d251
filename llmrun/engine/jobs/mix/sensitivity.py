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

from llmrun import _native
from llmrun.engine.jobs.importance.activations import GgmlTensor, plain_name
from llmrun.engine.jobs.mix.quants import Array
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import BadLogitsError, BadModelError, OutOfMemoryError

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
        self._model, self._llama, self._tokens = model, model.llama, tokens
        self._wanted = frozenset(names)
        self._found: dict[str, dict[int, GgmlTensor]] = {}
        self._callback = self._llama.ggml_backend_sched_eval_callback(self._look)
        self._context = self._make_context(threads)
        self._memory = self._llama.llama_get_memory(self._context)
        self.predicts = bool(self._memory)
        later = range(min(_SKIPPED, len(tokens) // 2), len(tokens))
        self._scored = set(later[:: -(-len(later) * model.vocabulary.n_tokens // _LOGITS)])
        self.positions = len(self._scored)
        self._batch = self._make_batch()
        self._reference: Array | None = None
        self._probabilities: Array | None = None

    def _make_context(self, threads: int) -> Any:
        params = self._llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = len(self._tokens)
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = threads
        params.op_offload = params.offload_kqv = False  # tensors elsewhere would be copies
        params.cb_eval = self._callback
        params.abort_callback = self._llama.ggml_abort_callback(_native.abort_callback_address)
        params.abort_callback_data = self._model.flag.address
        context = self._llama.llama_init_from_model(self._model.pointer, params)
        if not context:
            raise OutOfMemoryError(f"there is no memory for reading {len(self._tokens)} tokens at once")
        return context

    def _make_batch(self) -> Any:
        batch = self._llama.llama_batch_init(len(self._tokens), 0, 1)
        batch.n_tokens = len(self._tokens)
        for index, token in enumerate(self._tokens):
            batch.token[index], batch.pos[index] = token, index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = index in self._scored
        return batch

    def _look(self, address: int, ask: bool, data: Any) -> bool:
        """llama_context_params.cb_eval: note where the tensors are; no result is asked for."""
        for source in GgmlTensor.from_address(address).src:
            if source:
                tensor = GgmlTensor.from_address(source)
                name = plain_name(tensor.name)
                if name in self._wanted and not tensor.view_src:
                    self._found.setdefault(name, {})[source] = tensor
        return False

    def close(self) -> None:
        """Free the context."""
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)

    def read(self) -> Array:
        """Log-probabilities of all tokens at the compared positions, float32 [positions, vocabulary]."""
        self._llama.llama_memory_clear(self._memory, True)
        status = self._llama.llama_decode(self._context, self._batch)
        if status != 0:
            raise BadModelError("llama.cpp could not read a text with this model", why=f"status {status}")
        rows, columns = self.positions, self._model.vocabulary.n_tokens
        pointer = ctypes.cast(self._llama.llama_get_logits(self._context), ctypes.c_void_p).value
        assert pointer
        memory: Any = (ctypes.c_float * (rows * columns)).from_address(pointer)
        logits = np.frombuffer(memory, np.float32).reshape(rows, columns)
        logits = logits - logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        if not np.isfinite(logits[:, 0]).all():
            raise BadLogitsError("the model computed logits that are no numbers")
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

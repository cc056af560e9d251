"""Sums the squares of what a model's matrices are multiplied with, column by column, while ggml computes.

Owns ggml's tensors as they lie in memory, and the arithmetic, which is llama.cpp's (tools/imatrix/imatrix.cpp); must
not know what text the model reads, nor files.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from llmrun.errors import BadModelError, LlmrunError

_MAX_SOURCES, _NAME_BYTES, _PARAMETER_BYTES = 10, 64, 64  # GGML_MAX_SRC, GGML_MAX_NAME, GGML_MAX_OP_PARAMS
_OBJECT_BYTES = 32  # ggml_tensor_overhead() counts the object around a tensor too
_F32 = 0
_LEAST_ROWS = 16  # of the tokens of a matrix product; fewer are no text


class GgmlTensor(ctypes.Structure):
    """struct ggml_tensor."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),  # elements of each dimension, the contiguous one first
        ("nb", ctypes.c_size_t * 4),  # bytes from one to the next
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * (_PARAMETER_BYTES // 4)),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * _MAX_SOURCES),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * _NAME_BYTES),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


@dataclass(slots=True)
class Sums:
    """Of one tensor.

    Attributes:
        squares: float64 [matrices, columns].
        counts: int64 [experts], or [1] where every matrix reads everything.
    """

    squares: Any
    counts: Any


class Activations:
    """What ggml calls for every step of a computation: llama_context_params.cb_eval.

    Attributes:
        sums: tensor -> what was summed so far.
        callback: for llama.cpp; lives as long as this object.
    """

    def __init__(self, llama: Any, *, includes_output: bool) -> None:
        """Begin with nothing.

        Args:
            llama: llama-cpp-python's module.
            includes_output: "output.weight" counts too.

        Raises:
            LlmrunError: ggml's tensors have another layout.
        """
        self.sums: dict[str, Sums] = {}
        self.callback = llama.ggml_backend_sched_eval_callback(self._called)
        self._includes_output = includes_output
        self._ggml = _Ggml(llama._lib)
        self._failure: BaseException | None = None
        self._seen = 0  # tensors of this computation
        self._last = 0  # tensors of the first one: what comes after them need not be computed
        self._source: tuple[Any, Any] = (None, None)  # what was summed last, and its sums

    def begin(self) -> None:
        """Another piece of text goes through the model."""
        self._last = self._last or self._seen
        self._seen, self._source = 0, (None, None)

    def check(self) -> None:
        """Raise what went wrong inside ggml's computation, where nothing can be raised.

        Raises:
            BadModelError: the model computed numbers that are not finite.
        """
        if self._failure is not None:
            raise self._failure

    def _called(self, address: int, ask: bool, data: Any) -> bool:
        """Whether a tensor is wanted, if that is asked; otherwise it is there, and False ends the computation."""
        tensor = GgmlTensor.from_address(address)
        if ask:
            return self._wants(tensor)
        try:
            self._add(tensor)
        except BaseException as failure:  # it can't go up through C++: check() raises it
            self._failure = failure
            return False
        self._seen += 1
        return self._seen != self._last

    def _wants(self, tensor: GgmlTensor) -> bool:
        if tensor.op == self._ggml.mul_mat_id:
            return True
        if tensor.op != self._ggml.mul_mat:
            return False
        weights, inputs = (GgmlTensor.from_address(tensor.src[i]) for i in (0, 1))
        if inputs.ne[1] < _LEAST_ROWS or inputs.type != _F32:
            return False
        name = plain_name(weights.name)
        return name.startswith("blk.") or (self._includes_output and name == "output.weight")

    def _add(self, tensor: GgmlTensor) -> None:
        weights, inputs = (GgmlTensor.from_address(tensor.src[i]) for i in (0, 1))
        name = plain_name(weights.name)
        if tensor.op == self._ggml.mul_mat_id:
            chosen = self._ggml.numbers(GgmlTensor.from_address(tensor.src[2]), ctypes.c_int32)
            squares, counts = _experts(self._ggml.numbers(inputs), chosen[0, 0], weights.ne[2])
        else:
            source = (tensor.src[1], weights.ne[3], weights.ne[2])
            if source != self._source[0]:  # query, key and value have the same inputs
                self._source = (source, _dense(self._ggml.numbers(inputs), weights.ne[3], weights.ne[2]))
            squares, counts = self._source[1]
        before = self.sums.get(name)
        if before is None:
            self.sums[name] = before = Sums(squares.astype("f8"), counts.copy())
        else:
            before.squares += squares
            before.counts += counts
        if not self._ggml.numpy.isfinite(before.squares).all():
            raise BadModelError(f"the inputs of {name} are not finite numbers", why="the model is damaged or overflows")


def plain_name(name: bytes) -> str:
    """A weight's name without what ggml puts around it for its copy on another device: "CUDA0#NAME#0"."""
    text = name.decode("utf-8", "replace")
    return text.split("#")[1] if "#" in text else text


def _dense(inputs: Any, n_outer: int, n_inner: int) -> tuple[Any, Any]:
    """Sums over all rows, of each of the weights' matrices; more inputs than matrices take turns with them.

    Args:
        inputs: float32 [outer, inner, rows, columns].
        n_outer, n_inner: of the weights' matrices.
    """
    import numpy as np

    outer, inner, rows, columns = inputs.shape
    if outer == inner == n_outer == n_inner == 1:
        plain = inputs[0, 0]
        return np.einsum("rc,rc->c", plain, plain)[None], np.array([rows])
    squares = np.zeros((n_outer * n_inner, columns))
    for o in range(outer):
        for i in range(inner):
            matrix = (o % n_outer) * n_inner + i % n_inner
            squares[matrix] += np.einsum("rc,rc->c", inputs[o, i], inputs[o, i])
    return squares, np.array([outer * inner * rows // (n_outer * n_inner)])


def _experts(inputs: Any, chosen: Any, n_experts: int) -> tuple[Any, Any]:
    """Sums of each expert over the tokens that were given to it.

    Args:
        inputs: float32 [1, tokens, inputs of a token, columns]: one for all of its experts, or one for each.
        chosen: int32 [tokens, experts of a token].
    """
    import numpy as np

    squares = np.zeros((n_experts, inputs.shape[3]))
    for expert in np.unique(chosen):
        tokens, places = np.nonzero(chosen == expert)
        rows = inputs[0, tokens, places % inputs.shape[2]]
        squares[expert] = np.einsum("rc,rc->c", rows, rows)
    return squares, np.bincount(chosen.reshape(-1), minlength=n_experts)


class _Ggml:
    """The few functions of ggml that are needed, and its numbers of two operations."""

    def __init__(self, library: Any) -> None:
        import numpy

        self.numpy = numpy
        library.ggml_tensor_overhead.restype = ctypes.c_size_t
        if library.ggml_tensor_overhead() != ctypes.sizeof(GgmlTensor) + _OBJECT_BYTES:
            raise LlmrunError("ggml_tensor has an unexpected size on this platform")
        library.ggml_op_name.restype = ctypes.c_char_p
        names = {library.ggml_op_name(number): number for number in range(64)}
        self.mul_mat, self.mul_mat_id = names[b"MUL_MAT"], names[b"MUL_MAT_ID"]
        self._is_host, self._get = library.ggml_backend_buffer_is_host, library.ggml_backend_tensor_get
        self._is_host.argtypes, self._is_host.restype = [ctypes.c_void_p], ctypes.c_bool
        self._get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._get.restype = None
        self._bytes = library.ggml_nbytes
        self._bytes.argtypes, self._bytes.restype = [ctypes.c_void_p], ctypes.c_size_t

    def numbers(self, tensor: GgmlTensor, kind: Any = ctypes.c_float) -> Any:
        """A tensor's elements as an array of four dimensions, the contiguous one last; from a GPU they are copied."""
        address, numpy = ctypes.addressof(tensor), self.numpy
        size = self._bytes(address)
        if self._is_here(tensor):
            flat = numpy.frombuffer((ctypes.c_char * size).from_address(tensor.data), kind)
        else:
            flat = numpy.empty(size // ctypes.sizeof(kind), kind)
            self._get(address, flat.ctypes.data, 0, size)
        return numpy.lib.stride_tricks.as_strided(flat, tensor.ne[::-1], tensor.nb[::-1], writeable=False)

    def _is_here(self, tensor: GgmlTensor) -> bool:
        """Whether its data can be read where they are."""
        return not tensor.buffer or bool(self._is_host(tensor.buffer))

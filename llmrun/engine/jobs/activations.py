"""Sums of the squared inputs of a model's matrices, column by column, collected while ggml computes.

Owns the arithmetic, which is llama.cpp's (tools/imatrix/imatrix.cpp); must not know texts or files.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from llmrun.engine.llama.tensors import GgmlTensor, TensorNumbers, operation_numbers
from llmrun.errors import BadModelError

_F32 = 0
_MIN_ROWS = 16  # tokens of a matrix product; fewer are not a text


@dataclass(slots=True)
class Sums:
    """The sums of one tensor."""

    squares: Any  # float64 [matrices, columns]
    counts: Any  # int64 [experts], or [1] if every matrix reads all rows


class Activations:
    """The sums of all tensors, collected by an evaluation callback."""

    def __init__(self, *, includes_output: bool) -> None:
        self.sums: dict[str, Sums] = {}
        self._includes_output = includes_output
        self._numbers = TensorNumbers()
        numbers = operation_numbers()
        self._mul_mat, self._mul_mat_id = numbers["MUL_MAT"], numbers["MUL_MAT_ID"]
        self._seen = 0  # tensors of this computation
        self._last = 0  # tensors of the first computation: later ones end after as many
        self._source: tuple[Any, Any] = (None, None)  # the input summed last, and its sums

    def begin(self) -> None:
        self._last = self._last or self._seen
        self._seen, self._source = 0, (None, None)

    def watch(self, tensor: GgmlTensor, ask: bool) -> bool:
        """Observe a tensor, see llama.watch.Watch; end the computation after the last required tensor.

        Raises:
            BadModelError: the model computed numbers that are not finite.
        """
        if ask:
            return self._is_required(tensor)
        self._add(tensor)
        self._seen += 1
        return self._seen != self._last

    def _is_required(self, tensor: GgmlTensor) -> bool:
        if tensor.op == self._mul_mat_id:
            return True
        if tensor.op != self._mul_mat:
            return False
        weights, inputs = tensor.source(0), tensor.source(1)
        if inputs.ne[1] < _MIN_ROWS or inputs.type != _F32:
            return False
        name = weights.plain_name
        return name.startswith("blk.") or (self._includes_output and name == "output.weight")

    def _add(self, tensor: GgmlTensor) -> None:
        import numpy as np

        weights, inputs = tensor.source(0), tensor.source(1)
        name = weights.plain_name
        if tensor.op == self._mul_mat_id:
            chosen = self._numbers(tensor.source(2), ctypes.c_int32)
            squares, counts = _experts(self._numbers(inputs), chosen[0, 0], weights.ne[2])
        else:
            source = (tensor.src[1], weights.ne[3], weights.ne[2])
            if source != self._source[0]:  # query, key and value have the same inputs
                self._source = (source, _dense(self._numbers(inputs), weights.ne[3], weights.ne[2]))
            squares, counts = self._source[1]
        before = self.sums.get(name)
        if before is None:
            self.sums[name] = before = Sums(squares.astype("f8"), counts.copy())
        else:
            before.squares += squares
            before.counts += counts
        if not np.isfinite(before.squares).all():
            raise BadModelError(f"the inputs of {name} are not finite numbers", why="the model is damaged or overflows")


def _dense(inputs: Any, n_outer: int, n_inner: int) -> tuple[Any, Any]:
    """Return the sums over all rows for each of the weights' matrices, which are broadcast over more inputs.

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
    """Return the sums of each expert over its tokens.

    Args:
        inputs: float32 [1, tokens, inputs of a token, columns]: one input for all of its experts, or one for each.
        chosen: int32 [tokens, experts of a token].
    """
    import numpy as np

    squares = np.zeros((n_experts, inputs.shape[3]))
    for expert in np.unique(chosen):
        tokens, places = np.nonzero(chosen == expert)
        rows = inputs[0, tokens, places % inputs.shape[2]]
        squares[expert] = np.einsum("rc,rc->c", rows, rows)
    return squares, np.bincount(chosen.reshape(-1), minlength=n_experts)

"""Dequantization of AWQ, GPTQ and FP8 checkpoints to floating-point rows.

Owns their layouts; must not know architectures. Memory holds one packed tensor, and some rows of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llmrun.convert.encode import to_float32
from llmrun.convert.safetensors import CheckpointTensor
from llmrun.convert.sources import TensorSource, chunk_rows, stored_source
from llmrun.errors import BadModelError, UsageError

if TYPE_CHECKING:
    from llmrun.convert.encode import Array, Floats

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble of an int32 holds the first, second ... of its 8 columns
# Scales of activations and of the KV cache, which only runtimes use.
_UNUSED = ("activation_scale", ".input_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_output_scale")


def weight_sources(tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Return name -> values of all weights of a checkpoint, dequantized if necessary.

    Args:
        config: "quantization_config" of config.json; empty if there is none.

    Raises:
        UsageError: the quantization method is not supported.
        BadModelError: a part of a quantized tensor is missing or does not fit.
    """
    method = str(config.get("quant_method", "")).lower()
    if not config:
        return {name: stored_source(tensor) for name, tensor in tensors.items()}
    if method == "gptq":
        return _unpacked(tensors, _gptq_reader(config))
    if method == "awq":
        return _unpacked(tensors, _awq_reader(config))
    plain_fp8 = config.get("format") in ("float-quantized", "naive-quantized")
    if method == "fp8" or (method == "compressed-tensors" and plain_fp8):
        return _float8(tensors, config)
    named = method or "an unnamed method"
    layout = f" ({config['format']})" if isinstance(config.get("format"), str) else ""
    raise UsageError(
        f"weights quantized with {named}{layout:.60} can't be converted",
        why="AWQ, GPTQ and FP8 can be unpacked",
        hint="use the model's original weights",
    )


# ---- AWQ and GPTQ: integers, scales and zero points for groups of inputs

# Dequantizes a packed matrix (inputs x outputs): takes a range of outputs, returns their rows.
_Rows = Callable[[int, int], "Floats"]


class _Parts:
    """Tensors that make up one packed matrix."""

    def __init__(self, base: str, tensors: Mapping[str, CheckpointTensor]) -> None:
        self.base = base
        self._tensors = tensors

    def find(self, suffix: str, kinds: tuple[str, ...]) -> CheckpointTensor:
        """Return one part; raise BadModelError if it is missing or has another type."""
        tensor = self._tensors.get(f"{self.base}.{suffix}")
        if tensor is None or tensor.kind not in kinds:
            has = "is missing" if tensor is None else f"holds {tensor.kind} numbers"
            raise BadModelError(f"the quantized tensor {self.base!r} is damaged", why=f"its {suffix} {has}")
        return tensor

    def has(self, suffix: str) -> bool:
        return f"{self.base}.{suffix}" in self._tensors

    def matrices(self) -> tuple[CheckpointTensor, CheckpointTensor, CheckpointTensor]:
        """Return packed weights, packed zero points and scales."""
        found = self.find("qweight", ("I32",)), self.find("qzeros", ("I32",)), self.find("scales", _FLOATS)
        if any(len(tensor.shape) != 2 for tensor in found):
            raise self.fail("its parts are not matrices")
        return found

    def fail(self, why: str) -> BadModelError:
        return BadModelError(f"the quantized tensor {self.base!r} is damaged", why=why)


_Reader = Callable[[_Parts], "tuple[tuple[int, int], Callable[[], _Rows]]"]  # returns shape and loader
_FLOATS = ("F16", "BF16", "F32")


def _unpacked(tensors: Mapping[str, CheckpointTensor], reader: _Reader) -> dict[str, TensorSource]:
    found: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        base, _, suffix = name.rpartition(".")
        if suffix == "qweight":
            shape, load = reader(_Parts(base, tensors))
            found[f"{base}.weight"] = TensorSource(f"{base}.weight", "F32", shape, _row_chunks(shape, load))
        elif suffix in ("qzeros", "scales", "g_idx") and f"{base}.qweight" in tensors:
            continue
        elif suffix != "bias" or 0 not in tensor.shape:  # some tools write an empty tensor for a missing bias
            found[name] = stored_source(tensor)
    return found


def _row_chunks(shape: tuple[int, int], load: Callable[[], _Rows]) -> Callable[[int], Iterator[Array]]:
    def chunks(multiple: int) -> Iterator[Array]:
        rows = load()
        step = chunk_rows(shape, multiple)
        for start in range(0, shape[0], step):
            yield rows(start, min(start + step, shape[0]))

    return chunks


def _bits(config: Mapping[str, Any], allowed: tuple[int, ...]) -> int:
    bits = config.get("bits", config.get("w_bit"))
    if type(bits) is not int or bits not in allowed:
        choices = ", ".join(map(str, allowed))
        raise UsageError(f"{config['quant_method']} weights of {bits} bits can't be unpacked", why=f"{choices} can")
    return bits


def _gptq_reader(config: Mapping[str, Any]) -> _Reader:
    """Return a reader of GPTQ: inputs are packed into int32; zero points of groups of inputs along the outputs."""
    import numpy as np

    bits = _bits(config, (2, 4, 8))
    per_word = 32 // bits
    # The first version of the format stores zero points minus one.
    offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def read(parts: _Parts) -> tuple[tuple[int, int], Callable[[], _Rows]]:
        weight, zeros, scales = parts.matrices()
        n_in, n_out, n_groups = weight.shape[0] * per_word, weight.shape[1], scales.shape[0]
        if scales.shape != (n_groups, n_out) or zeros.shape != (n_groups, -(-n_out // per_word)) or not n_groups:
            raise parts.fail(f"scales {scales.shape} and qzeros {zeros.shape} don't fit {n_in} x {n_out}")

        def load() -> _Rows:
            packed, groups = weight.whole(), _gptq_groups(parts, n_in, n_groups)
            factor = to_float32(scales.whole(), scales.kind)
            zero = _unpack(zeros.whole(), bits, 1)[:, :n_out] + offset

            def rows(start: int, stop: int) -> Floats:
                values = _unpack(packed[:, start:stop], bits, 0) - zero[groups, start:stop]
                scaled: Floats = values * factor[groups, start:stop]
                return np.ascontiguousarray(scaled.T)

            return rows

        return (n_out, n_in), load

    return read


def _gptq_groups(parts: _Parts, n_in: int, n_groups: int) -> Array:
    import numpy as np

    if not parts.has("g_idx"):
        return np.arange(n_in) // -(-n_in // n_groups)
    groups = parts.find("g_idx", ("I32", "I64")).whole()
    if groups.shape != (n_in,) or groups.min(initial=0) < 0 or groups.max(initial=0) >= n_groups:
        raise parts.fail("its g_idx names groups that don't exist")
    return groups


def _awq_reader(config: Mapping[str, Any]) -> _Reader:
    """Return a reader of AWQ's GEMM layout: outputs are packed into int32, in the order _AWQ_PLACES."""
    import numpy as np

    bits = _bits(config, (4,))
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise UsageError(f"AWQ weights in the layout {version[:40]!r} can't be unpacked", why="only 'gemm' can")

    def read(parts: _Parts) -> tuple[tuple[int, int], Callable[[], _Rows]]:
        weight, zeros, scales = parts.matrices()
        n_in, n_out, n_groups = weight.shape[0], weight.shape[1] * 8, scales.shape[0]
        if scales.shape[1] != n_out or zeros.shape != (n_groups, weight.shape[1]) or not n_groups or n_in % n_groups:
            raise parts.fail(f"scales {scales.shape} and qzeros {zeros.shape} don't fit {n_in} x {n_out}")

        def load() -> _Rows:
            packed, zero = weight.whole(), zeros.whole()
            factor = to_float32(scales.whole(), scales.kind)
            size = n_in // n_groups

            def rows(start: int, stop: int) -> Floats:
                words = slice(start // 8, -(-stop // 8))
                inside = slice(start % 8, start % 8 + stop - start)
                values = _awq_columns(packed[:, words], bits)[:, inside]
                centre = _awq_columns(zero[:, words], bits)[:, inside]
                values = values.reshape(n_groups, size, -1) - centre[:, None]
                scaled: Floats = values * factor[:, None, start:stop]
                return np.ascontiguousarray(scaled.reshape(n_in, -1).T)

            return rows

        return (n_out, n_in), load

    return read


def _awq_columns(packed: Array, bits: int) -> Floats:
    columns = _unpack(packed, bits, 1)
    return columns.reshape(len(packed), -1, 8)[:, :, list(_AWQ_PLACES)].reshape(len(packed), -1)


def _unpack(packed: Array, bits: int, axis: int) -> Floats:
    """Unpack unsigned integers of `bits` bits from int32 along a dimension, the lowest bits first."""
    import numpy as np

    words = np.expand_dims(packed.view(np.uint32), axis + 1)
    places = [-1 if place == axis + 1 else 1 for place in range(3)]
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape(places)
    values: Array = (words >> shifts) & np.uint32(2**bits - 1)
    shape = list(packed.shape)
    shape[axis] *= 32 // bits
    return values.astype(np.float32).reshape(shape)


# ---- FP8: one scale for a tensor, a row or a block


def _float8(tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any]) -> dict[str, TensorSource]:
    found: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        if name.endswith(("weight_scale", "weight_scale_inv", *_UNUSED)):
            continue
        source = stored_source(tensor)
        if tensor.kind.startswith("F8"):
            scale = tensors.get(f"{name}_scale_inv") or tensors.get(f"{name}_scale")
            if scale is None:
                raise BadModelError(f"the FP8 tensor {name!r} has no scale", hint="download the model again")
            source = _scaled(source, scale, config)
        found[name] = source
    return found


def _scaled(source: TensorSource, scale: CheckpointTensor, config: Mapping[str, Any]) -> TensorSource:
    """Multiply float8 values by their scales."""
    import numpy as np

    block_rows, block_columns = _block(source, scale, config)

    def chunks(multiple: int) -> Iterator[Array]:
        factors = to_float32(scale.whole(), scale.kind).reshape(_scale_shape(scale))
        start = 0
        for chunk in source.chunks(multiple):
            rows = np.arange(start, start + len(chunk)) // block_rows
            per_column = np.repeat(factors[rows], block_columns, axis=1)[:, : source.shape[1]]
            yield to_float32(chunk, source.kind) * per_column
            start += len(chunk)

    return TensorSource(source.name, "F32", source.shape, chunks)


def _scale_shape(scale: CheckpointTensor) -> tuple[int, int]:
    if len(scale.shape) == 2:
        return scale.shape[0], scale.shape[1]
    return (scale.shape[0], 1) if scale.shape else (1, 1)


def _block(source: TensorSource, scale: CheckpointTensor, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of rows and columns that share one scale."""
    if len(source.shape) != 2 or len(scale.shape) > 2 or scale.kind not in _FLOATS or 0 in source.shape:
        raise BadModelError(f"the FP8 tensor {source.name!r} has no scale that fits")
    n_rows, n_columns = source.shape
    down, across = _scale_shape(scale)
    if (down, across) == (1, 1):
        return n_rows, n_columns
    if (down, across) == (n_rows, 1):
        return 1, n_columns
    size = config.get("weight_block_size", [128, 128])
    are_sizes = isinstance(size, list) and len(size) == 2 and all(type(one) is int and one > 0 for one in size)
    if are_sizes and (down, across) == (-(-n_rows // size[0]), -(-n_columns // size[1])):
        return size[0], size[1]
    raise BadModelError(
        f"the scales of the FP8 tensor {source.name!r} don't fit it",
        why=f"{down} x {across} scales for {n_rows} x {n_columns} weights in blocks of {size!r:.40}",
    )

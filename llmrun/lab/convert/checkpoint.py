"""The weights of a checkpoint: safetensors files, element types, and AWQ, GPTQ and FP8 unpacked to rows.

The files are untrusted: a header is bounded, every extent is checked, and the tensors must fill the data exactly,
without holes or overlaps. The safetensors package is not used: with numpy it refuses BF16 and F8 (safetensors 0.8), it
maps files (SIGBUS if one gets shorter), and of a repeated name it takes the last.

numpy has neither bfloat16 nor float8: bfloat16 is held as uint16, the upper half of a float32; float8 as uint8.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from llmrun.errors import BadModelError, ModelNotFoundError, UsageError, listed
from llmrun.lab.convert.folder import Folder, open_regular, parse_object

Array = npt.NDArray[Any]
Floats = npt.NDArray[Any]  # of float32; numpy's stubs lose the element type in most operations

# Element type in a safetensors file -> numpy's type code, little-endian like the file.
STORED_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "BOOL": "u1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip
FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


def to_float32(values: Array, type_name: str) -> Floats:
    """Decode stored elements to float32; `type_name` is one of FLOAT_TYPES."""
    if type_name == "BF16":
        bits: Array = values.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    if type_name.startswith("F8"):
        return _float8_values(type_name)[values]
    return values.astype(np.float32, copy=False)


def encode(values: Floats, type_name: str) -> Array:
    """Encode float32 rows as F32, F16, BF16 or Q8_0; for Q8_0, return the bytes of its blocks."""
    if type_name == "F32":
        return values
    with np.errstate(over="ignore"):  # the caller checks for infinite values, see all_finite()
        if type_name == "F16":
            return values.astype(np.float16)

        encoded = quants.quantize(values, GGMLQuantizationType[type_name])
    return encoded.view(np.uint16) if type_name == "BF16" else encoded


def all_finite(values: Array, type_name: str) -> bool:
    """Return whether every element is finite, in a type that to_float32() or encode() returns."""
    if type_name == "BF16":
        return not bool(np.any((values & np.uint16(0x7F80)) == np.uint16(0x7F80)))
    if type_name == "Q8_0":
        scales = np.ascontiguousarray(values.reshape(-1, 34)[:, :2]).view(np.float16)
        return bool(np.isfinite(scales).all())
    return bool(np.isfinite(values).all())


@cache
def _float8_values(type_name: str) -> Floats:
    """Return the values of the 256 bytes of a float8 type. E4M3 is the variant without infinities (E4M3FN)."""
    codes = np.arange(256, dtype=np.uint16)
    if type_name == "F8_E5M2":  # the upper half of a float16
        halves: Array = codes << np.uint16(8)
        return halves.view(np.float16).astype(np.float32)
    exponent, fraction = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    small = np.ldexp(fraction / 8, -6)
    large = np.ldexp(1 + fraction / 8, exponent.astype(np.int32) - 7)
    values = np.where(exponent == 0, small, large).astype(np.float32)
    values[(codes & 127) == 127] = np.nan
    values[codes >= 128] *= -1
    return values


# ---- safetensors files: https://huggingface.co/docs/safetensors/index

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 8
MAX_NAME = 1000  # characters
MAX_PARTS = 2000
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ELEMENT_BYTES = {type_name: int(code[-1]) for type_name, code in STORED_TYPES.items()}


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Tensor in a file."""

    name: str
    type: str  # of the elements, one of STORED_TYPES
    shape: tuple[int, ...]  # in PyTorch's order, the contiguous dimension last
    offset: int  # of the data in the file, in bytes
    file: BinaryIO

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * _ELEMENT_BYTES[self.type]

    def rows(self, start: int, stop: int) -> Array:
        """Return the elements of some rows of the first dimension, in numpy's type of STORED_TYPES.

        Raises BadModelError if the file has become shorter.
        """
        row_bytes = prod(self.shape[1:]) * _ELEMENT_BYTES[self.type]
        self.file.seek(self.offset + start * row_bytes)
        data = _read(self.file, (stop - start) * row_bytes)
        if len(data) < (stop - start) * row_bytes:
            raise BadModelError(f"the file of tensor {self.name!r} became shorter while it was read")
        return np.frombuffer(data, STORED_TYPES[self.type]).reshape(stop - start, *self.shape[1:])

    def whole(self) -> Array:
        if not self.shape:
            return replace(self, shape=(1,)).rows(0, 1).reshape(())
        return self.rows(0, self.shape[0])


@contextmanager
def open_checkpoint(folder: Folder) -> Iterator[dict[str, CheckpointTensor]]:
    """Open all tensors of a folder, in one or many files: name -> tensor.

    Raises:
        UsageError: the folder holds only weights that can't be used: pickles, adapters, other formats.
        ModelNotFoundError: a file is missing.
        BadModelError: a file is damaged, or the index names a missing tensor.
    """
    parts = _parts(folder)
    with ExitStack() as files:
        checkpoint: dict[str, CheckpointTensor] = {}
        for name, listed in parts.items():
            file = files.enter_context(open_regular(folder.path / name))
            tensors = read_table(file, folder.path / name)
            for tensor in tensors if listed is None else listed:
                if tensor not in tensors:
                    raise BadModelError(f"{name} has no tensor {tensor!r}", why=f"{_INDEX} lists it there")
                if tensor in checkpoint:
                    raise BadModelError(f"tensor {tensor!r} appears twice", why=f"in {name} and in another file")
                checkpoint[tensor] = tensors[tensor]
        yield checkpoint


def read_table(file: BinaryIO, path: Path) -> dict[str, CheckpointTensor]:
    """Return the tensors of one open file. Raises BadModelError if the file is not safetensors, or damaged."""
    size = file.seek(0, 2)
    file.seek(0)
    start = _read(file, 8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise BadModelError(
            f"{str(path)!r} is not a safetensors file, or truncated",
            why=f"its header would be {length:,} bytes long, the file has {size:,}",
            hint="download it again; with git, run `git lfs pull` in the folder",
        )
    header = parse_object(_read(file, length), str(path))
    header.pop("__metadata__", None)
    table = [_row(name, row, 8 + length, file, path) for name, row in header.items()]
    table.sort(key=lambda tensor: (tensor.offset, tensor.n_bytes))
    position = 8 + length
    for tensor in table:
        if tensor.offset != position:
            _damaged(path, f"tensor {tensor.name!r} begins at byte {tensor.offset}; it should be at {position}")
        position += tensor.n_bytes
    if position != size:
        _damaged(path, f"its tensors end at byte {position:,}, the file at byte {size:,}")
    return {tensor.name: tensor for tensor in table}


def _row(name: str, row: Any, data_start: int, file: BinaryIO, path: Path) -> CheckpointTensor:
    if len(name) > MAX_NAME:
        _damaged(path, f"a tensor has a name of {len(name):,} characters")
    type_name = row.get("dtype") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(type_name, str):
        _damaged(path, f"the entry of tensor {name!r} names no type")
    if type_name not in STORED_TYPES:
        _damaged(path, f"tensor {name!r} has the unknown type {type_name[:40]!r}")
    shape, offsets = _counts(row.get("shape")), _counts(row.get("data_offsets"))
    if shape is None or len(shape) > MAX_DIMENSIONS or prod(shape) >= 2**60:
        _damaged(path, f"tensor {name!r} has the impossible shape {str(row.get('shape'))[:80]}")
    if offsets is None or len(offsets) != 2:
        _damaged(path, f"tensor {name!r} has the impossible offsets {str(row.get('data_offsets'))[:80]}")
    tensor = CheckpointTensor(name, type_name, shape, data_start + offsets[0], file)
    if offsets[1] - offsets[0] != tensor.n_bytes:
        _damaged(path, f"tensor {name!r} has {offsets[1] - offsets[0]} bytes; its shape needs {tensor.n_bytes}")
    return tensor


def _counts(values: Any) -> tuple[int, ...] | None:
    """Return the values as a tuple, None unless they are a list of non-negative integers."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**60 for value in values):
        return None
    return tuple(values)


def _read(file: BinaryIO, length: int) -> bytes:
    """Read N bytes, fewer at the end of the file: one read() of the operating system returns at most 2 GB."""
    parts = []
    while length and (part := file.read(min(length, 1 << 30))):
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _damaged(path: Path, reason: str) -> NoReturn:
    raise BadModelError(f"{str(path)!r} is damaged", why=reason, hint="download it again")


# ---- which files


def _parts(folder: Folder) -> Mapping[str, list[str] | None]:
    """Return file -> names of the tensors to take from it, None for all."""
    if folder.has(_INDEX):
        return _indexed(folder)
    names = folder.names()
    parts = [name for name in names if name.startswith("model") and name.endswith(".safetensors")]
    if not parts:
        _refuse_weights(folder, names)
    if len(parts) > 1 and "model.safetensors" in parts:
        parts = ["model.safetensors"]
    return dict.fromkeys(parts[:MAX_PARTS])


def _indexed(folder: Folder) -> dict[str, list[str] | None]:
    weight_map = folder.json(_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModelError(f"{_INDEX} is damaged", why="it has no weight_map", hint="download it again")
    parts: dict[str, list[str] | None] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise BadModelError(f"{_INDEX} is damaged", why=f"it lists tensor {tensor!r} in {name!r:.80}")
        tensors = parts.setdefault(name, [])
        assert tensors is not None
        tensors.append(tensor)
    missing = [name for name in parts if not folder.has(name)]
    if missing or len(parts) > MAX_PARTS:
        raise ModelNotFoundError(
            f"{listed(missing, 3)} missing in {str(folder.path)!r}",
            why=f"the model is split into {len(parts)} files",
            hint="download the missing files into the folder",
        )
    return parts


def _refuse_weights(folder: Folder, names: list[str]) -> NoReturn:
    """Raise an error that explains a folder without usable weights."""
    pickles = [name for name in names if name.endswith(_PICKLES)]
    what = f"{str(folder.path)!r} has no model.safetensors"
    if any(name.startswith("adapter_model") for name in names):
        raise UsageError(what, why="it holds an adapter without its adapter_config.json", hint="download that file too")
    if pickles:
        raise UsageError(
            f"{pickles[0]} is a pickle file",
            why="loading a pickle can run arbitrary code, so pickles (.bin, .pt) are never read",
            hint="find a revision of the model with .safetensors files, or save it as safetensors",
        )
    if any(name.endswith(".gguf") for name in names):
        raise UsageError(what, why="it holds GGUF files, which need no conversion", hint="llmrun run FOLDER/NAME.gguf")
    if any(name.startswith("consolidated") for name in names):
        raise UsageError(what, why="it is in Mistral's own format", hint="use the files in Hugging Face's format")
    if any(name.endswith((".h5", ".msgpack", ".onnx", ".ot")) for name in names):
        raise UsageError(what, why="weights of TensorFlow, Flax or ONNX can't be converted")
    raise ModelNotFoundError(what, why="there are no weights in it", hint="name the folder of a downloaded model")


# ---- sources: rows of a file, read while they are iterated, some at a time

CHUNK_ELEMENTS = 4 * 1024 * 1024

Chunks = Callable[[int], Iterator[Array]]


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Values of a tensor."""

    name: str  # in the checkpoint
    type: str  # of the chunks' elements, one of FLOAT_TYPES
    shape: tuple[int, ...]  # in PyTorch's order, the contiguous dimension last
    chunks: Chunks  # yields groups of rows; the size of a group is a multiple of the argument


def chunk_rows(shape: tuple[int, ...], multiple: int = 1) -> int:
    return max(1, CHUNK_ELEMENTS // max(prod(shape[1:]) * multiple, 1)) * multiple


def stored_source(tensor: CheckpointTensor) -> TensorSource:
    """Return the source of a stored tensor, unchanged."""
    shape = tensor.shape or (1,)
    whole = replace(tensor, shape=shape)

    def chunks(multiple: int) -> Iterator[Array]:
        step = chunk_rows(shape, multiple)
        for start in range(0, shape[0], step):
            yield whole.rows(start, min(start + step, shape[0]))

    return TensorSource(tensor.name, tensor.type, shape, chunks)


def require_floats(source: TensorSource) -> TensorSource:
    """Return the source. Raises BadModelError if its elements are not floating-point numbers."""
    if source.type not in FLOAT_TYPES:
        raise BadModelError(
            f"tensor {source.name!r} holds {source.type} numbers",
            why="weights must be floating-point numbers, unless config.json describes their quantization",
        )
    return source


def array_source(name: str, values: Floats) -> TensorSource:
    return TensorSource(name, "F32", values.shape, lambda multiple: iter((values,)))


def permute_heads(source: TensorSource, n_heads: int) -> TensorSource:
    """Reorder query or key rows for ggml's rotation: pairs are adjacent, not half a head apart.

    Raises BadModelError if the rows don't divide into `n_heads` heads of even length.
    """
    n_rows = source.shape[0]
    if n_heads < 1 or n_rows % (2 * n_heads):
        raise BadModelError(
            f"tensor {source.name!r} has {n_rows} rows", why=f"they don't divide into {n_heads} heads of even length"
        )
    head = n_rows // n_heads

    def chunks(multiple: int) -> Iterator[Array]:
        assert multiple == 1, "rows are reordered once"
        for chunk in source.chunks(head):
            halves = chunk.reshape(len(chunk) // head, 2, head // 2, *chunk.shape[1:])
            yield halves.swapaxes(1, 2).reshape(chunk.shape)

    return replace(source, chunks=chunks)


def stack_experts(name: str, experts: Sequence[TensorSource]) -> TensorSource:
    """Stack the same matrix of all experts into one tensor.

    Raises BadModelError if the matrices differ in shape or type.
    """
    first = experts[0]
    other = next((expert for expert in experts if (expert.shape, expert.type) != (first.shape, first.type)), None)
    if other is not None:
        raise BadModelError(f"the experts' tensors {first.name!r} and {other.name!r} differ in shape or type")

    def chunks(multiple: int) -> Iterator[Array]:
        for expert in experts:
            yield from expert.chunks(multiple)

    return TensorSource(name, first.type, (len(experts), *first.shape), chunks)


def take_half(source: TensorSource, number: int) -> TensorSource:
    """Take the upper (0) or lower (1) half of each expert's rows.

    Raises BadModelError if the tensor is not three-dimensional with an even number of rows.
    """
    if len(source.shape) != 3 or source.shape[1] % 2:
        raise BadModelError(f"tensor {source.name!r} has the shape {list(source.shape)}")
    n_experts, n_rows, n_columns = source.shape[0], source.shape[1] // 2, source.shape[2]

    def chunks(multiple: int) -> Iterator[Array]:
        for chunk in source.chunks(multiple):
            yield chunk[:, number * n_rows : (number + 1) * n_rows]

    return replace(source, shape=(n_experts, n_rows, n_columns), chunks=chunks)


def map_values(source: TensorSource, function: Callable[[Floats], Floats]) -> TensorSource:
    """Apply a function to every chunk, in float32."""

    def chunks(multiple: int) -> Iterator[Array]:
        for chunk in source.chunks(multiple):
            yield function(to_float32(chunk, source.type))

    return replace(source, type="F32", chunks=chunks)


# ---- packed weights: memory holds one packed tensor, and some rows of the result

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
_Rows = Callable[[int, int], Floats]


class _Parts:
    """Tensors that make up one packed matrix."""

    def __init__(self, base: str, tensors: Mapping[str, CheckpointTensor]) -> None:
        self.base = base
        self._tensors = tensors

    def find(self, suffix: str, types: tuple[str, ...]) -> CheckpointTensor:
        """Return one part; raise BadModelError if it is missing or has another type."""
        tensor = self._tensors.get(f"{self.base}.{suffix}")
        if tensor is None or tensor.type not in types:
            has = "is missing" if tensor is None else f"holds {tensor.type} numbers"
            raise BadModelError(f"the quantized tensor {self.base!r} is damaged", why=f"its {suffix} {has}")
        return tensor

    def has(self, suffix: str) -> bool:
        return f"{self.base}.{suffix}" in self._tensors

    def matrices(self) -> tuple[CheckpointTensor, CheckpointTensor, CheckpointTensor]:
        """Return packed weights, packed zero points and scales."""
        parts = self.find("qweight", ("I32",)), self.find("qzeros", ("I32",)), self.find("scales", _FLOATS)
        if any(len(tensor.shape) != 2 for tensor in parts):
            raise self.fail("its parts are not matrices")
        return parts

    def fail(self, why: str) -> BadModelError:
        return BadModelError(f"the quantized tensor {self.base!r} is damaged", why=why)


_Reader = Callable[[_Parts], tuple[tuple[int, int], Callable[[], _Rows]]]  # returns shape and loader
_FLOATS = ("F16", "BF16", "F32")


def _unpacked(tensors: Mapping[str, CheckpointTensor], reader: _Reader) -> dict[str, TensorSource]:
    sources: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        base, _, suffix = name.rpartition(".")
        if suffix == "qweight":
            shape, load = reader(_Parts(base, tensors))
            sources[f"{base}.weight"] = TensorSource(f"{base}.weight", "F32", shape, _row_chunks(shape, load))
        elif suffix in ("qzeros", "scales", "g_idx") and f"{base}.qweight" in tensors:
            continue
        elif suffix != "bias" or 0 not in tensor.shape:  # some tools write an empty tensor for a missing bias
            sources[name] = stored_source(tensor)
    return sources


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
            factor = to_float32(scales.whole(), scales.type)
            zero = _unpack(zeros.whole(), bits, 1)[:, :n_out] + offset

            def rows(start: int, stop: int) -> Floats:
                values = _unpack(packed[:, start:stop], bits, 0) - zero[groups, start:stop]
                scaled: Floats = values * factor[groups, start:stop]
                return np.ascontiguousarray(scaled.T)

            return rows

        return (n_out, n_in), load

    return read


def _gptq_groups(parts: _Parts, n_in: int, n_groups: int) -> Array:
    if not parts.has("g_idx"):
        return np.arange(n_in) // -(-n_in // n_groups)
    groups = parts.find("g_idx", ("I32", "I64")).whole()
    if groups.shape != (n_in,) or groups.min(initial=0) < 0 or groups.max(initial=0) >= n_groups:
        raise parts.fail("its g_idx names groups that don't exist")
    return groups


def _awq_reader(config: Mapping[str, Any]) -> _Reader:
    """Return a reader of AWQ's GEMM layout: outputs are packed into int32, in the order _AWQ_PLACES."""
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
            factor = to_float32(scales.whole(), scales.type)
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
    words = np.expand_dims(packed.view(np.uint32), axis + 1)
    places = [-1 if place == axis + 1 else 1 for place in range(3)]
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape(places)
    values: Array = (words >> shifts) & np.uint32(2**bits - 1)
    shape = list(packed.shape)
    shape[axis] *= 32 // bits
    return values.astype(np.float32).reshape(shape)


# ---- FP8: one scale for a tensor, a row or a block


def _float8(tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any]) -> dict[str, TensorSource]:
    sources: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        if name.endswith(("weight_scale", "weight_scale_inv", *_UNUSED)):
            continue
        source = stored_source(tensor)
        if tensor.type.startswith("F8"):
            scale = tensors.get(f"{name}_scale_inv") or tensors.get(f"{name}_scale")
            if scale is None:
                raise BadModelError(f"the FP8 tensor {name!r} has no scale", hint="download the model again")
            source = _scaled(source, scale, config)
        sources[name] = source
    return sources


def _scaled(source: TensorSource, scale: CheckpointTensor, config: Mapping[str, Any]) -> TensorSource:
    """Multiply float8 values by their scales."""
    block_rows, block_columns = _block(source, scale, config)

    def chunks(multiple: int) -> Iterator[Array]:
        factors = to_float32(scale.whole(), scale.type).reshape(_scale_shape(scale))
        start = 0
        for chunk in source.chunks(multiple):
            rows = np.arange(start, start + len(chunk)) // block_rows
            per_column = np.repeat(factors[rows], block_columns, axis=1)[:, : source.shape[1]]
            yield to_float32(chunk, source.type) * per_column
            start += len(chunk)

    return TensorSource(source.name, "F32", source.shape, chunks)


def _scale_shape(scale: CheckpointTensor) -> tuple[int, int]:
    if len(scale.shape) == 2:
        return scale.shape[0], scale.shape[1]
    return (scale.shape[0], 1) if scale.shape else (1, 1)


def _block(source: TensorSource, scale: CheckpointTensor, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of rows and columns that share one scale."""
    if len(source.shape) != 2 or len(scale.shape) > 2 or scale.type not in _FLOATS or 0 in source.shape:
        raise BadModelError(f"the FP8 tensor {source.name!r} has no scale that fits")
    n_rows, n_columns = source.shape
    down, across = _scale_shape(scale)
    if (down, across) == (1, 1):
        return n_rows, n_columns
    if (down, across) == (n_rows, 1):
        return 1, n_columns
    size = config.get("weight_block_size", [128, 128])
    are_sizes = isinstance(size, list) and len(size) == 2 and all(type(length) is int and length > 0 for length in size)
    if are_sizes and (down, across) == (-(-n_rows // size[0]), -(-n_columns // size[1])):
        return size[0], size[1]
    raise BadModelError(
        f"the scales of the FP8 tensor {source.name!r} don't fit it",
        why=f"{down} x {across} scales for {n_rows} x {n_columns} weights in blocks of {size!r:.40}",
    )

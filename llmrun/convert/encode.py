"""Element types: numpy decodes stored elements to float32, gguf-py encodes float32 for the output file.

numpy has neither bfloat16 nor float8: bfloat16 is held as uint16, the upper half of a float32; float8 as uint8.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Floats = npt.NDArray[Any]  # of float32; numpy's stubs lose the element type in most operations

# Element type in a safetensors file -> numpy's type code, little-endian like the file.
STORED_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "BOOL": "u1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip
FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


def to_float32(values: Array, kind: str) -> Floats:
    """Decode stored elements to float32; `kind` is one of FLOAT_TYPES."""
    import numpy as np

    if kind == "BF16":
        bits: Array = values.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    if kind.startswith("F8"):
        return _float8_values(kind)[values]
    return values.astype(np.float32, copy=False)


def encode(values: Floats, kind: str) -> Array:
    """Encode float32 rows as F32, F16, BF16 or Q8_0; for Q8_0, return the bytes of its blocks."""
    import numpy as np

    if kind == "F32":
        return values
    with np.errstate(over="ignore"):  # the caller checks for infinite values, see all_finite()
        if kind == "F16":
            return values.astype(np.float16)
        from gguf import GGMLQuantizationType, quants

        found = quants.quantize(values, GGMLQuantizationType[kind])
    return found.view(np.uint16) if kind == "BF16" else found


def all_finite(values: Array, kind: str) -> bool:
    """Return whether every element is finite, in a type that to_float32() or encode() returns."""
    import numpy as np

    if kind == "BF16":
        return not bool(np.any((values & np.uint16(0x7F80)) == np.uint16(0x7F80)))
    if kind == "Q8_0":
        scales = np.ascontiguousarray(values.reshape(-1, 34)[:, :2]).view(np.float16)
        return bool(np.isfinite(scales).all())
    return bool(np.isfinite(values).all())


@cache
def _float8_values(kind: str) -> Floats:
    """Return the values of the 256 bytes of a float8 type. E4M3 is the variant without infinities (E4M3FN)."""
    import numpy as np

    codes = np.arange(256, dtype=np.uint16)
    if kind == "F8_E5M2":  # the upper half of a float16
        halves: Array = codes << np.uint16(8)
        return halves.view(np.float16).astype(np.float32)
    exponent, fraction = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    small = np.ldexp(fraction / 8, -6)
    large = np.ldexp(1 + fraction / 8, exponent.astype(np.int32) - 7)
    values = np.where(exponent == 0, small, large).astype(np.float32)
    values[(codes & 127) == 127] = np.nan
    values[codes >= 128] *= -1
    return values

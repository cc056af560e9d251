"""What a GGUF file says about itself: metadata, tensor table, sizes. Never the weights.

Owns the file format and its limits; must not know what the values mean (header.py) nor llama.cpp's
rules for them (check.py). A model file is untrusted input: every count, length, offset and extent is checked
against the file's size before it is used, nothing recurses, and the time is O(header).

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from llmrun.errors import BadModelError, ModelNotFoundError
from llmrun.models.header import ArrayInfo, Header, Tensor, Value

__all__ = ["ArrayInfo", "Header", "Tensor", "Value", "read_header"]

MAX_HEADER_BYTES = 256 * 1024 * 1024
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_STRINGS = 4 * 1024 * 1024  # in all string arrays together; the largest vocabularies have 0.8 million
MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 63  # GGML_MAX_NAME, without its end mark
MAX_DIMENSIONS = 4
INLINE_ELEMENTS = 512  # LLAMA_MAX_LAYERS: arrays with one number per layer are read without being asked for
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9

# GGUF value type -> (name, struct code); strings and arrays have no code.
_VALUE_TYPES: dict[int, tuple[str, str]] = {
    0: ("u8", "B"), 1: ("i8", "b"), 2: ("u16", "H"), 3: ("i16", "h"), 4: ("u32", "I"), 5: ("i32", "i"),
    6: ("f32", "f"), 7: ("bool", "?"), _STRING: ("string", ""), _ARRAY: ("array", ""),
    10: ("u64", "Q"), 11: ("i64", "q"), 12: ("f64", "d"),
}  # fmt: skip

# ggml_type -> (name, elements per block, bytes per block), from ggml.h; removed types are left out.
_TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}  # fmt: skip


def read_header(path: Path, *, arrays: Collection[str] = ()) -> Header:
    """Read everything before the weights.

    Args:
        path: a local file; of a split model any part, the first has the metadata.
        arrays: keys of arrays to read whatever their length.

    Raises:
        ModelNotFoundError: there is no regular file that can be read.
        BadModelError: it is not GGUF, or damaged; the message names the field and its value.
    """
    descriptor = _open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size < 24:
            raise BadModelError(
                f"{str(path)!r} is not a model file", why=f"it has {size} bytes, fewer than any GGUF file"
            )
        # The mapping is the limit: nothing can be read beyond it.
        with mmap.mmap(descriptor, min(size, MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path, size, data, frozenset(arrays)).read()
    except OSError as error:
        raise ModelNotFoundError(f"can't read {str(path)!r}", why=error.strerror or str(error)) from error
    finally:
        os.close(descriptor)


def _open_regular(path: Path) -> int:
    """A descriptor of a regular file. Anything else is refused before it is opened: a FIFO would hang."""
    shown = repr(str(path))
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelNotFoundError(f"{shown} is a folder, not a model file", hint="name the .gguf file inside it")
        if not stat.S_ISREG(mode):
            raise ModelNotFoundError(f"{shown} is not a regular file", why="it is a pipe or a device")
        # Without blocking, in case it has become a FIFO since.
        return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"there is no file {shown}") from error
    except OSError as error:
        raise ModelNotFoundError(f"can't open {shown}", why=error.strerror or str(error)) from error
    except ValueError as error:  # a NUL in the name
        raise ModelNotFoundError(f"{shown} can't be a file's name", why=str(error)) from error


class _HeaderReader:
    """Walks one mapped header from its start; every step checks what is left."""

    def __init__(self, path: Path, file_size: int, data: mmap.mmap, arrays: frozenset[str]) -> None:
        self.path = path
        self.file_size = file_size
        self.data = data
        self.end = len(data)
        self.position = 0
        self.wanted = arrays
        self.strings = 0  # elements of string arrays so far

    def read(self) -> Header:
        if self.take(4, "magic") != b"GGUF":
            raise BadModelError(
                f"{str(self.path)!r} is not a GGUF model",
                why=f"it begins with {bytes(self.data[:4])!r} instead of b'GGUF'",
            )
        version = self.version()
        n_tensors = self.count("number of tensors", least_bytes=24, most=MAX_TENSORS)
        n_keys = self.count("number of metadata keys", least_bytes=13, most=MAX_KEYS)
        metadata = self.metadata(n_keys)
        tensors = self.tensors(n_tensors, self.alignment(metadata))
        return Header(self.path, self.file_size, version, metadata, tensors)

    def fail(self, why: str) -> NoReturn:
        raise BadModelError(
            f"the model file {str(self.path)!r} is damaged",
            why=why,
            hint="download it again, or ask whoever made it",
        )

    # ---- single values

    def take(self, length: int, field: str) -> bytes:
        """The next bytes. `field` names them in the error message."""
        left = self.end - self.position
        if length > left:
            limit = "the file" if self.end == self.file_size else f"the limit of {MAX_HEADER_BYTES} for headers"
            self.fail(f"{field} needs {length} bytes, but {limit} ends {left} bytes on")
        start = self.position
        self.position = start + length
        return self.data[start : self.position]

    def number(self, code: str, field: str) -> Any:
        """The next value of a struct code."""
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), field))
        return value

    def string(self, field: str, most: int = MAX_HEADER_BYTES) -> bytes:
        length = self.number("Q", f"the length of {field}")
        if length > most:
            self.fail(f"{field} is {length} bytes long; at most {most} are allowed")
        return self.take(length, field)

    def count(self, field: str, *, least_bytes: int, most: int) -> int:
        """A count of things that take at least so many bytes each, refused when they can't fit."""
        value: int = self.number("Q", field)
        if value > most or value * least_bytes > self.end:
            self.fail(f"the {field} is {value}, more than this file can hold")
        return value

    def version(self) -> int:
        version: int = self.number("I", "version")
        if version & 0xFFFF == 0:
            self.fail(f"version is {version:#x}: the file is for big-endian machines, or no GGUF")
        if version not in (2, 3):
            self.fail(f"version is {version}; versions 2 and 3 can be read")
        return version

    # ---- metadata

    def metadata(self, n_keys: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for index in range(n_keys):
            raw = self.string(f"metadata key {index}", MAX_KEY_BYTES)
            key = raw.decode("utf-8", "backslashreplace")
            if not key or key in found:
                self.fail(f"metadata key {index} is {key!r}, {'which is there twice' if key else 'empty'}")
            found[key] = self.value(key)
        return found

    def value(self, key: str) -> Value:
        kind = self.number("I", f"the type of {key!r}")
        if kind == _ARRAY:
            return self.array(key)
        if kind == _STRING:
            return self.string(repr(key)).decode("utf-8", "replace")
        value: Value = self.number(self.code(kind, key), repr(key))
        return value

    def code(self, kind: int, key: str) -> str:
        """The struct code of a number's type."""
        if kind not in _VALUE_TYPES or kind == _ARRAY:
            problem = "an array in an array" if kind == _ARRAY else f"an unknown type {kind}"
            self.fail(f"{key!r} has {problem}")
        return _VALUE_TYPES[kind][1]

    def array(self, key: str) -> Value:
        kind = self.number("I", f"the element type of {key!r}")
        code = self.code(kind, key)
        length: int = self.number("Q", f"the length of {key!r}")
        least_bytes = struct.calcsize("<" + code) if code else 8
        if length * least_bytes > self.end - self.position:
            self.fail(f"{key!r} has {length} elements, more than the file can hold")
        if not code:
            return self.strings_array(key, length)
        if key in self.wanted and length > MAX_STRINGS:
            self.fail(f"{key!r} has {length} elements; at most {MAX_STRINGS} are read")
        start = self.position
        self.position += length * least_bytes
        if key in self.wanted or length <= INLINE_ELEMENTS:
            return struct.unpack_from(f"<{length}{code}", self.data, start)
        return ArrayInfo(_VALUE_TYPES[kind][0], length)

    def strings_array(self, key: str, length: int) -> Value:
        self.strings += length
        if self.strings > MAX_STRINGS:
            self.fail(f"{key!r} has {length} elements; all string arrays may have {MAX_STRINGS} together")
        start = self.position
        try:
            self.position = _skip_strings(self.data, start, length)
        except (struct.error, OverflowError, IndexError):
            self.position = self.end + 1
        if self.position > self.end:
            self.fail(f"a string in {key!r} is longer than the rest of the file")
        if key in self.wanted:
            return _strings(self.data, start, length)
        return ArrayInfo("string", length)

    # ---- tensor table

    def alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value <= 0 or value & (value - 1) or value >= 2**32:
            self.fail(f"'general.alignment' is {value!r}, not a power of two")
        return value

    def tensors(self, n_tensors: int, alignment: int) -> tuple[Tensor, ...]:
        rows = [self.tensor(index) for index in range(n_tensors)]
        data_start = -(-self.position // alignment) * alignment
        names: set[str] = set()
        expected = 0
        for row in rows:
            if row.name in names:
                self.fail(f"tensor {row.name!r} is there twice")
            names.add(row.name)
            if row.offset != expected:
                self.fail(f"tensor {row.name!r} is at offset {row.offset}; it should be at {expected}")
            stop = data_start + row.offset + row.n_bytes
            if stop > self.file_size:
                self.fail(
                    f"the file is cut off: tensor {row.name!r} ends at byte {stop}, the file at byte {self.file_size}"
                )
            expected += -(-row.n_bytes // alignment) * alignment
        return tuple(Tensor(row.name, row.shape, row.type, row.n_bytes, data_start + row.offset) for row in rows)

    def tensor(self, index: int) -> Tensor:
        """One row, its offset still relative to the data section."""
        raw = self.string(f"the name of tensor {index}", MAX_TENSOR_NAME_BYTES)
        name = raw.decode("utf-8", "backslashreplace")
        n_dimensions = self.number("I", f"the dimensions of {name!r}")
        if n_dimensions > MAX_DIMENSIONS:
            self.fail(f"tensor {name!r} has {n_dimensions} dimensions; at most {MAX_DIMENSIONS} are allowed")
        packed = self.take(8 * n_dimensions, f"the shape of {name!r}")
        shape = struct.unpack(f"<{n_dimensions}q", packed) or (1,)
        kind, offset = struct.unpack("<IQ", self.take(12, f"the type of {name!r}"))
        if kind not in _TENSOR_TYPES:
            self.fail(f"tensor {name!r} has an unknown type {kind}")
        type_name, block_elements, block_bytes = _TENSOR_TYPES[kind]
        if min(shape) < 0 or shape[0] % block_elements:
            self.fail(f"tensor {name!r} of type {type_name} has the impossible shape {list(shape)}")
        n_bytes = prod(shape) // block_elements * block_bytes
        return Tensor(name, shape, type_name, n_bytes, offset)


def _skip_strings(data: mmap.mmap, position: int, count: int) -> int:
    """The position after `count` strings. The tight loop of this file: a vocabulary has 50,000 and more."""
    unpack_from = struct.Struct("<Q").unpack_from
    for _ in range(count):
        position += 8 + unpack_from(data, position)[0]
    return position


def _strings(data: mmap.mmap, position: int, count: int) -> tuple[bytes, ...]:
    """`count` strings whose lengths _skip_strings has checked."""
    unpack_from = struct.Struct("<Q").unpack_from
    found = []
    for _ in range(count):
        start = position + 8
        position = start + unpack_from(data, position)[0]
        found.append(data[start:position])
    return tuple(found)

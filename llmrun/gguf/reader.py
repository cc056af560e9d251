"""The reader of GGUF headers: metadata, tensor table and sizes, never the weights.

A model file is untrusted: every count, length, offset and extent is checked against the file's size before it is used,
nothing recurses, memory is bounded, and the time is O(header).

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from llmrun import _native
from llmrun.errors import BadModelError, LlmrunError, ModelNotFoundError, first_bytes
from llmrun.gguf.header import Header, Tensor, other_parts, unite
from llmrun.gguf.metadata import ArrayInfo, Value, length_of
from llmrun.gguf.types import TENSOR_TYPES, TYPE_NAMES
from llmrun.protocol.media import MODALITIES, Modality

MAX_HEADER_BYTES = 256 * 1024 * 1024
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_STRINGS = 4 * 1024 * 1024  # in all string arrays together; the largest vocabularies have 0.8 million
MAX_KEY_BYTES = 65_535
MAX_TEXT_BYTES = 32 * 1024 * 1024  # of all keys and single strings together
MAX_TENSOR_NAME_BYTES = 63  # GGML_MAX_NAME, without its end mark
MAX_DIMENSIONS = 4
INLINE_TEXT_BYTES = 4 * 1024 * 1024  # longer strings are skipped unless requested
INLINE_ELEMENTS = 512  # LLAMA_MAX_LAYERS: arrays with one number per layer are read without a request
MAX_INLINE_ELEMENTS = 256 * 1024  # in all these arrays together; the others are skipped
DEFAULT_ALIGNMENT = 32
SMALLEST_FILE = 24  # magic, version and two counts

_STRING, _ARRAY = 8, 9
_TOKENS = "tokenizer.ggml.tokens"
_SPECIAL_TOKEN = re.compile(r"tokenizer\.ggml\.\w+_token_id")
_TOKEN_TEXT_BYTES = 1024
_MARK_EVERY = 1024  # strings of the vocabulary between two places that are remembered
# Key -> GGUF value type that the format prescribes, or llama.cpp, which aborts otherwise.
_PRESCRIBED_TYPES = {"general.alignment": 4, "split.no": 2, "split.count": 2, "split.tensors.count": 5}

# GGUF value type -> (name, struct code); strings and arrays have no code.
_VALUE_TYPES: dict[int, tuple[str, str]] = {
    0: ("u8", "B"), 1: ("i8", "b"), 2: ("u16", "H"), 3: ("i16", "h"), 4: ("u32", "I"), 5: ("i32", "i"),
    6: ("f32", "f"), 7: ("bool", "?"), _STRING: ("string", ""), _ARRAY: ("array", ""),
    10: ("u64", "Q"), 11: ("i64", "q"), 12: ("f64", "d"),
}  # fmt: skip


class NeedMoreBytes(Exception):  # noqa: N818  # no error: the caller fetches more of the file
    """The header is longer than the given bytes."""

    def __init__(self, until: int) -> None:
        super().__init__(f"{until} bytes")
        self.until = until  # minimum number of bytes from the file's start


def padded(n_bytes: int) -> int:
    """Return the bytes of a tensor in a file of the default alignment, which llama.cpp and llmrun write."""
    return -(-n_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def read_header(path: Path, *, arrays: Collection[str] = ()) -> Header:
    """Read the header of a model, with the tensors of all files of a split one.

    Args:
        path: a local file; of a split model the first, with the others beside it.
        arrays: keys of arrays to read whatever their length.

    Raises:
        ModelNotFoundError: no regular file can be read, or another file of a split model is missing.
        BadModelError: the file is not GGUF, or damaged; names the field and its value.
    """
    first = read_part(path, arrays=arrays)
    names = other_parts(first)
    return unite(first, [_read_beside(first, name) for name in names]) if names else first


def _read_beside(first: Header, name: str) -> Header:
    path = first.path.with_name(name)
    if not path.exists():
        raise ModelNotFoundError(
            f"{str(path)!r} is missing",
            why=f"the model is split into {first.split_count} files, which have to be in one folder",
            hint="put them all there; `llmrun pull` fetches all of them",
        )
    return read_part(path)


def read_part(path: Path, *, arrays: Collection[str] = ()) -> Header:
    """Read the header of one file, which may be any part of a split model. See read_header()."""
    descriptor = _open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size < SMALLEST_FILE:
            _refuse_size(path, size)
        # Nothing can be read beyond the mapping.
        with mmap.mmap(descriptor, min(size, MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as data:
            return parse_header(data, size, path, arrays=arrays)
    except OSError as error:
        raise ModelNotFoundError(f"can't read {str(path)!r}", why=error.strerror or str(error)) from error
    finally:
        os.close(descriptor)


def read_modalities(projector: Path | None) -> frozenset[Modality]:
    """Return the kinds of files that a projector encodes, see read_encoders(); none without a projector."""
    return frozenset(() if projector is None else read_encoders(projector))


def read_encoders(projector: Path) -> dict[Modality, int]:
    """Return the kinds of files that a projector encodes, each with the layers of its encoder, 0 if unknown.

    All kinds if its header can't be read: the engine will say why.
    """
    with suppress(LlmrunError):
        values = read_part(projector).metadata
        names: dict[Modality, str] = {"image": "vision", "audio": "audio"}
        found = {kind: name for kind, name in names.items() if values.get(f"clip.has_{name}_encoder") is True}
        layers = {kind: values.get(f"clip.{name}.block_count") for kind, name in found.items()}
        return {kind: count if isinstance(count, int) else 0 for kind, count in layers.items()}
    return dict.fromkeys(MODALITIES, 0)


def parse_header(data: bytes | mmap.mmap, file_size: int, path: Path, *, arrays: Collection[str] = ()) -> Header:
    """Parse the first bytes of a file.

    Args:
        data: bytes beyond MAX_HEADER_BYTES are never read.
        file_size: of the whole file, in bytes.
        path: for messages.
        arrays: see read_header().

    Raises:
        NeedMoreBytes: the header is longer than data.
        BadModelError: the file is not GGUF, or damaged.
    """
    if file_size < SMALLEST_FILE:
        _refuse_size(path, file_size)
    return _HeaderReader(path, file_size, data, frozenset(arrays)).read()


def _refuse_size(path: Path, size: int) -> NoReturn:
    raise BadModelError(f"{str(path)!r} is not a model file", why=f"it has {size} bytes, fewer than any GGUF file")


def _open_regular(path: Path) -> int:
    """Open a regular file. Others are refused before, because a FIFO would hang."""
    shown = repr(str(path))
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelNotFoundError(f"{shown} is a folder, not a model file", hint="name the .gguf file inside it")
        if not stat.S_ISREG(mode):
            raise ModelNotFoundError(f"{shown} is not a regular file", why="it is a pipe or a device")
        # Non-blocking, in case the path has become a FIFO since.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        try:
            return os.open(path, flags | getattr(os, "O_NOATIME", 0))  # a header is no use of a model
        except PermissionError:  # another user's file
            return os.open(path, flags)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"there is no file {shown}") from error
    except OSError as error:
        raise ModelNotFoundError(f"can't open {shown}", why=error.strerror or str(error)) from error
    except ValueError as error:  # a NUL in the name
        raise ModelNotFoundError(f"{shown} can't be a file's name", why=str(error)) from error


class _HeaderReader:
    """A cursor over one header; every step checks the bytes that are left."""

    def __init__(self, path: Path, file_size: int, data: bytes | mmap.mmap, arrays: frozenset[str]) -> None:
        self.path = path
        self.file_size = file_size
        self.data = data
        self.end = len(data)
        self.limit = min(file_size, MAX_HEADER_BYTES)
        self.position = 0
        self.requested = arrays
        self.strings = 0  # elements of string arrays
        self.text_bytes = 0  # of stored keys and strings
        self.elements = 0  # of stored short arrays
        self.marks: list[int] = []  # positions of every 1,024th token

    def read(self) -> Header:
        if self.take(4, "magic") != b"GGUF":
            begins = first_bytes(bytes(self.data[:4]))
            is_document = begins.startswith('"') and self.path.suffix.lower() != ".gguf"
            raise BadModelError(
                f"{str(self.path)!r} is not a GGUF model",
                why=f'it begins with {begins} instead of "GGUF"',
                hint="llmrun run MODEL -f FILE asks a model about a file" if is_document else "",
            )
        version = self.version()
        n_tensors = self.count("number of tensors", min_bytes=24, maximum=MAX_TENSORS)
        n_keys = self.count("number of metadata keys", min_bytes=13, maximum=MAX_KEYS)
        metadata = self.metadata(n_keys)
        tensors = self.tensors(n_tensors, self.alignment(metadata))
        return Header(self.path, self.file_size, version, metadata, tensors, self.special_texts(metadata))

    def fail(self, why: str) -> NoReturn:
        raise BadModelError(
            f"the model file {str(self.path)!r} is damaged",
            why=why,
            hint="download it again, or report the damage to its author",
        )

    def advance(self, position: int, field: str) -> None:
        """Go to a position, which must exist; `field` is for the error."""
        if position > self.limit:
            limit = "the file" if self.limit == self.file_size else f"the limit of {MAX_HEADER_BYTES} for headers"
            left = self.limit - self.position
            self.fail(f"{field} needs {position - self.position} bytes, but {limit} ends {left} bytes on")
        if position > self.end:
            raise NeedMoreBytes(position)
        self.position = position

    # ---- single values

    def take(self, length: int, field: str) -> bytes:
        start = self.position
        self.advance(start + length, field)
        return self.data[start : self.position]

    def number(self, code: str, field: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), field))
        return value

    def string(self, field: str, maximum: int = MAX_HEADER_BYTES) -> bytes:
        """Read a string that is stored."""
        length = self.number("Q", f"the length of {field}")
        if length > maximum:
            self.fail(f"{field} is {length} bytes long; at most {maximum} are allowed")
        self.text_bytes += length
        if self.text_bytes > MAX_TEXT_BYTES:
            self.fail(f"{field} is {length} bytes long; all texts may have {MAX_TEXT_BYTES} together")
        return self.take(length, field)

    def count(self, field: str, *, min_bytes: int, maximum: int) -> int:
        """Read a number of items of at least `min_bytes` each; refuse it if they can't fit."""
        value: int = self.number("Q", field)
        if value > maximum or value * min_bytes > self.limit:
            self.fail(f"the {field} is {value}, more than this file can hold")
        return value

    def version(self) -> int:
        version: int = self.number("I", "version")
        if version in (2, 3):
            return version
        why, hint = f"version is {version}; versions 2 and 3 can be read", "pip install --upgrade llmrun"
        if version < 2:
            hint = "files that old have to be converted again"
        elif version & 0xFFFF == 0:
            why = f"version is {version:#x}: the file is for big-endian machines, or no GGUF"
            hint = "look for the little-endian file of this model"
        raise BadModelError(f"{str(self.path)!r} is not a GGUF file that can be used here", why=why, hint=hint)

    # ---- metadata

    def metadata(self, n_keys: int) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for index in range(n_keys):
            raw = self.string(f"metadata key {index}", MAX_KEY_BYTES)
            key = raw.decode("utf-8", "backslashreplace")
            if not key or key in values:
                self.fail(f"metadata key {index} is {key!r}, {'a duplicate' if key else 'empty'}")
            values[key] = self.value(key)
        return values

    def value(self, key: str) -> Value:
        type_number = self.number("I", f"the type of {key!r}")
        required = _PRESCRIBED_TYPES.get(key, type_number)
        if type_number != required:
            name = _VALUE_TYPES[type_number][0] if type_number in _VALUE_TYPES else type_number
            self.fail(f"{key!r} has the type {name}; it has to be {_VALUE_TYPES[required][0]}")
        if type_number == _ARRAY:
            return self.array(key)
        if type_number == _STRING:
            return self.text(key)
        value: Value = self.number(self.code(type_number, key), repr(key))
        return value

    def text(self, key: str) -> Value:
        """Read a string; a very long one is skipped like an array of bytes."""
        start = self.position
        length: int = self.number("Q", f"the length of {key!r}")
        self.position = start
        if length <= INLINE_TEXT_BYTES or key in self.requested:
            return self.string(repr(key)).decode("utf-8", "replace")
        self.advance(start + 8 + length, repr(key))
        return ArrayInfo(length)

    def code(self, type_number: int, key: str) -> str:
        """Return the struct code of a number's type."""
        if type_number not in _VALUE_TYPES or type_number == _ARRAY:
            problem = "an array in an array" if type_number == _ARRAY else f"an unknown type {type_number}"
            self.fail(f"{key!r} has {problem}")
        return _VALUE_TYPES[type_number][1]

    def array(self, key: str) -> Value:
        type_number = self.number("I", f"the element type of {key!r}")
        code = self.code(type_number, key)
        length: int = self.number("Q", f"the length of {key!r}")
        min_bytes = struct.calcsize("<" + code) if code else 8
        if length * min_bytes > self.limit - self.position:
            self.fail(f"{key!r} has {length} elements, more than the file can hold")
        if not code:
            return self.strings_array(key, length)
        if key in self.requested and length > MAX_STRINGS:
            self.fail(f"{key!r} has {length} elements; at most {MAX_STRINGS} are read")
        start = self.position
        self.advance(start + length * min_bytes, repr(key))
        if key not in self.requested:
            self.elements += length if length <= INLINE_ELEMENTS else 0
            if length > INLINE_ELEMENTS or self.elements > MAX_INLINE_ELEMENTS:
                return ArrayInfo(length)
        return struct.unpack_from(f"<{length}{code}", self.data, start)

    def strings_array(self, key: str, length: int) -> Value:
        self.strings += length
        if self.strings > MAX_STRINGS:
            self.fail(f"{key!r} has {length} elements; all string arrays may have {MAX_STRINGS} together")
        start = position = self.position
        marks = []
        for done in range(0, length, _MARK_EVERY):
            marks.append(position)
            position = _native.skip_strings(self.data, position, min(_MARK_EVERY, length - done))
            if position > self.end:
                break
        if position > self.limit:
            self.fail(f"a string in {key!r} is longer than the rest of the file")
        self.advance(position, repr(key))
        if key == _TOKENS:
            self.marks = marks
        if key in self.requested:
            return _strings(self.data, start, length)
        return ArrayInfo(length)

    def special_texts(self, metadata: Mapping[str, Value]) -> dict[int, bytes]:
        """Return the texts of the special tokens, by id."""
        n_tokens = length_of(metadata.get(_TOKENS))
        texts = {}
        for key, number in metadata.items():
            if not _SPECIAL_TOKEN.fullmatch(key) or not isinstance(number, int) or not 0 <= number < n_tokens:
                continue
            if number // _MARK_EVERY < len(self.marks):
                mark = self.marks[number // _MARK_EVERY]
                position = _native.skip_strings(self.data, mark, number % _MARK_EVERY)
                texts[number] = _strings(self.data, position, 1)[0][:_TOKEN_TEXT_BYTES]
        return texts

    # ---- tensor table

    def alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value <= 0 or value & (value - 1):
            self.fail(f"'general.alignment' is {value!r}, not a power of two")
        return value

    def tensors(self, n_tensors: int, alignment: int) -> tuple[Tensor, ...]:
        by_name: dict[str, Tensor] = {}
        for index in range(n_tensors):
            row = self.tensor(index)
            if row.name in by_name:
                self.fail(f"tensor {row.name!r} is a duplicate")
            by_name[row.name] = row
        data_start = -(-self.position // alignment) * alignment
        expected = 0
        for row in by_name.values():
            if row.offset != expected:
                self.fail(f"tensor {row.name!r} is at offset {row.offset}; it should be at {expected}")
            stop = data_start + row.offset + row.n_bytes
            if stop > self.file_size:
                self.fail(
                    f"the file is cut off: tensor {row.name!r} ends at byte {stop}, the file at byte {self.file_size}"
                )
            expected += -(-row.n_bytes // alignment) * alignment
        return tuple(
            Tensor(row.name, row.shape, row.type, row.n_bytes, data_start + row.offset) for row in by_name.values()
        )

    def tensor(self, index: int) -> Tensor:
        """Read one row; its offset is relative to the data section."""
        length = self.number("Q", f"the length of the name of tensor {index}")
        if length > MAX_TENSOR_NAME_BYTES:
            self.fail(f"the name of tensor {index} is {length} bytes long; at most {MAX_TENSOR_NAME_BYTES} are allowed")
        name = self.take(length, f"the name of tensor {index}").decode("utf-8", "backslashreplace")
        n_dimensions = self.number("I", f"the dimensions of {name!r}")
        if n_dimensions > MAX_DIMENSIONS:
            self.fail(f"tensor {name!r} has {n_dimensions} dimensions; at most {MAX_DIMENSIONS} are allowed")
        packed = self.take(8 * n_dimensions, f"the shape of {name!r}")
        shape = struct.unpack(f"<{n_dimensions}q", packed) or (1,)
        type_number, offset = struct.unpack("<IQ", self.take(12, f"the type of {name!r}"))
        if type_number not in TYPE_NAMES:
            self.fail(f"tensor {name!r} has an unknown type {type_number}")
        type_name = TYPE_NAMES[type_number]
        _, block_elements, block_bytes = TENSOR_TYPES[type_name]
        overflows = prod(size for size in shape if size > 0) >= 2**63
        if min(shape) < 0 or shape[0] % block_elements or overflows:
            self.fail(f"tensor {name!r} of type {type_name} has the impossible shape {list(shape)}")
        n_bytes = prod(shape) // block_elements * block_bytes
        return Tensor(name, shape, type_name, n_bytes, offset)


def _strings(data: bytes | mmap.mmap, position: int, count: int) -> tuple[bytes, ...]:
    """Return `count` strings whose lengths skip_strings() has checked."""
    unpack_from = struct.Struct("<Q").unpack_from
    strings = []
    for _ in range(count):
        start = position + 8
        position = start + unpack_from(data, position)[0]
        strings.append(data[start:position])
    return tuple(strings)

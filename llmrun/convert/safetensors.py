"""Reader of safetensors files: the table of tensors, and the elements of any rows.

Owns the format and its limits; must not know the purpose of a tensor. The file is untrusted: its header is bounded,
every extent is checked, and the tensors must fill the data exactly, without holes or overlaps. The safetensors
package is not used: it can't give BF16 and F8 to numpy, maps files (SIGBUS if one gets shorter) and accepts repeated
names.

The format: https://huggingface.co/docs/safetensors/index
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from llmrun.convert.encode import STORED_TYPES
from llmrun.convert.folder import Folder, open_regular, parse_object
from llmrun.errors import BadModelError, ModelNotFoundError, UsageError, listed

if TYPE_CHECKING:
    from llmrun.convert.encode import Array

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 8
MAX_NAME = 1000  # characters
MAX_PARTS = 2000
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ELEMENT_BYTES = {kind: int(code[-1]) for kind, code in STORED_TYPES.items()}


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Tensor in a file."""

    name: str
    kind: str  # type of the elements, one of encode.STORED_TYPES
    shape: tuple[int, ...]  # in PyTorch's order, the contiguous dimension last
    offset: int  # of the data in the file, in bytes
    file: BinaryIO

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * _ELEMENT_BYTES[self.kind]

    def rows(self, start: int, stop: int) -> Array:
        """Return the elements of some rows of the first dimension, in numpy's type of STORED_TYPES.

        Raises BadModelError if the file has become shorter.
        """
        import numpy as np

        row_bytes = prod(self.shape[1:]) * _ELEMENT_BYTES[self.kind]
        self.file.seek(self.offset + start * row_bytes)
        data = _read(self.file, (stop - start) * row_bytes)
        if len(data) < (stop - start) * row_bytes:
            raise BadModelError(f"the file of tensor {self.name!r} became shorter while it was read")
        return np.frombuffer(data, STORED_TYPES[self.kind]).reshape(stop - start, *self.shape[1:])

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
        found: dict[str, CheckpointTensor] = {}
        for name, listed in parts.items():
            file = files.enter_context(open_regular(folder.path / name))
            tensors = read_table(file, folder.path / name)
            for tensor in tensors if listed is None else listed:
                if tensor not in tensors:
                    raise BadModelError(f"{name} has no tensor {tensor!r}", why=f"{_INDEX} lists it there")
                if tensor in found:
                    raise BadModelError(f"tensor {tensor!r} appears twice", why=f"in {name} and in another file")
                found[tensor] = tensors[tensor]
        yield found


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
    kind = row.get("dtype") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(kind, str):
        _damaged(path, f"the entry of tensor {name!r} names no type")
    if kind not in STORED_TYPES:
        _damaged(path, f"tensor {name!r} has the unknown type {kind[:40]!r}")
    shape, offsets = _counts(row.get("shape")), _counts(row.get("data_offsets"))
    if shape is None or len(shape) > MAX_DIMENSIONS or prod(shape) >= 2**60:
        _damaged(path, f"tensor {name!r} has the impossible shape {str(row.get('shape'))[:80]}")
    if offsets is None or len(offsets) != 2:
        _damaged(path, f"tensor {name!r} has the impossible offsets {str(row.get('data_offsets'))[:80]}")
    tensor = CheckpointTensor(name, kind, shape, data_start + offsets[0], file)
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

"""Files of importance matrices: llama.cpp's GGUF, which is read and written, and its older binary format, only read.

Owns their bytes, and whether a matrix belongs to a model; must not know how one is collected nor what it is used for.
Such a file is as untrusted as a model: every length in it is checked before it is believed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.convert.sources import array_source
from llmrun.convert.tensors import Written
from llmrun.convert.write import header_bytes
from llmrun.errors import BadModelError, ModelNotFoundError, UsageError
from llmrun.gguf.header import Header, Tensor
from llmrun.gguf.reader import DEFAULT_ALIGNMENT, padded, read_part
from llmrun.models.store import new_file

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_TYPE = "general.type"
_DATASETS, _N_CHUNKS, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_MOST_NAME_BYTES = 63 - len(_SUMS)  # GGML_MAX_NAME
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ImatrixEntry:
    """What is known of one tensor.

    Attributes:
        sums: of the squares of what each column is multiplied with, [matrices, columns].
        counts: how many rows were summed, of each expert; one number where all matrices read everything.
    """

    sums: Floats
    counts: Floats


@dataclass(frozen=True, slots=True)
class ImatrixFile:
    """An importance matrix.

    Attributes:
        entries: tensor -> what is known of it.
        datasets: what it was collected on; untrusted text.
        n_chunks: of how many pieces of text; 0 where the file does not say.
        chunk_size: tokens of each; 0 where the file does not say.
    """

    entries: Mapping[str, ImatrixEntry]
    datasets: tuple[str, ...]
    n_chunks: int
    chunk_size: int


def write_imatrix(target: Path, imatrix: ImatrixFile) -> None:
    """Write a file that llama-quantize reads, whole or not at all.

    Raises:
        DiskFullError: there is no room for it.
        ResourceError: it can't be written there.
        UsageError: a tensor's name is too long for the format.
    """
    tensors = []
    for name, entry in sorted(imatrix.entries.items()):
        if len(name.encode()) > _MOST_NAME_BYTES:
            raise UsageError(f"tensor {name!r} has a name too long for an importance matrix")
        tensors.append(Written(name + _SUMS, "F32", array_source(name, entry.sums)))
        tensors.append(Written(name + _COUNTS, "F32", array_source(name, entry.counts.reshape(-1, 1))))
    metadata = {
        _TYPE: "imatrix",
        _DATASETS: list(imatrix.datasets),
        _N_CHUNKS: imatrix.n_chunks,
        _CHUNK_SIZE: imatrix.chunk_size,
    }
    header = header_bytes(metadata, tensors)
    new_file.require_room(target, len(header) + sum(tensor.n_bytes + DEFAULT_ALIGNMENT for tensor in tensors))
    with new_file.arriving(target) as path, path.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            for chunk in tensor.data():
                file.write(chunk.astype("<f4").tobytes())
            file.write(b"\0" * (padded(tensor.n_bytes) - tensor.n_bytes))


def read_imatrix(path: Path) -> ImatrixFile:
    """Read a file of either format.

    Raises:
        ModelNotFoundError: it is not there, or can't be read.
        UsageError: it is not an importance matrix.
        BadModelError: it is one, but damaged.
    """
    with _open(path) as file:
        is_gguf = file.read(4) == b"GGUF"
    return _read_gguf(path) if is_gguf else _Legacy(path).read()


def _open(path: Path) -> Any:
    try:
        if not path.is_file():
            raise ModelNotFoundError(f"there is no file {str(path)!r}", hint="name a file, or --imatrix auto")
        return path.open("rb")
    except OSError as error:
        raise ModelNotFoundError(f"can't read {str(path)!r}", why=error.strerror or str(error)) from None


# ---- GGUF ------------------------------------------------------------------------------------------


def _read_gguf(path: Path) -> ImatrixFile:
    header = read_part(path, arrays=(_DATASETS,))
    tensors = {tensor.name: tensor for tensor in header.tensors}
    names = [name.removesuffix(_SUMS) for name in tensors if name.endswith(_SUMS)]
    if not names:
        architecture = header.metadata.get("general.architecture")
        kind = f"it is a model ({architecture})" if isinstance(architecture, str) else "it is GGUF of something else"
        raise _is_none(path, kind)
    with _open(path) as file:
        entries = {name: _entry(header, file, tensors, name) for name in names}
    datasets = header.metadata.get(_DATASETS)
    texts = datasets if isinstance(datasets, tuple) else ()
    return ImatrixFile(
        entries,
        tuple(text.decode("utf-8", "replace") for text in texts if isinstance(text, bytes)),
        header.integer(_N_CHUNKS) or 0,
        header.integer(_CHUNK_SIZE) or 0,
    )


def _entry(header: Header, file: Any, tensors: Mapping[str, Tensor], name: str) -> ImatrixEntry:
    if name + _COUNTS not in tensors:
        raise _damaged(header.path, f"{name} has sums but no counts")
    sums, counts = (_numbers(header, file, tensors[name + end]) for end in (_SUMS, _COUNTS))
    return _checked(header.path, name, sums, counts)


def _numbers(header: Header, file: Any, tensor: Tensor) -> Floats:
    import numpy as np

    if tensor.type != "F32":
        raise _damaged(header.path, f"{tensor.name} is {tensor.type}; it has to be F32")
    file.seek(tensor.offset)
    return np.frombuffer(file.read(tensor.n_bytes), "<f4").astype(np.float32)


def _checked(path: Path, name: str, sums: Floats, counts: Floats) -> ImatrixEntry:
    import numpy as np

    if not counts.size or not sums.size or sums.size % counts.size:
        raise _damaged(path, f"{name} has {sums.size:,} sums for {counts.size:,} counts")
    if not (np.isfinite(sums).all() and np.isfinite(counts).all() and (sums >= 0).all() and (counts >= 0).all()):
        raise _damaged(path, f"{name} holds what can't be a sum of squares or a count")
    return ImatrixEntry(sums.reshape(counts.size, -1), counts)


def _damaged(path: Path, why: str) -> BadModelError:
    return BadModelError(f"the importance matrix {str(path)!r} is damaged", why=why, hint="collect it again")


def _is_none(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{str(path)!r} is not an importance matrix",
        why=why,
        hint="llama-imatrix makes one, and so does --imatrix auto",
    )


# ---- the older format ------------------------------------------------------------------------------


class _Legacy:
    """Walks through a file from its start: count, then name, calls, length and numbers of each, then the text's name.

    Its numbers are means times calls, so the calls are their count.
    """

    def __init__(self, path: Path) -> None:
        with _open(path) as file:
            self.data: bytes = file.read()
        self.path, self.position = path, 0

    def read(self) -> ImatrixFile:
        count = self.integer()
        if not 1 <= count <= len(self.data) // 16:
            raise _is_none(self.path, "it begins neither as GGUF nor as the older format")
        entries = dict(self.entry() for _ in range(count))
        n_chunks, dataset = 0, ""
        if self.position < len(self.data):  # the oldest files end here
            n_chunks = self.integer()
            dataset = self.take(self.integer()).decode("utf-8", "replace")
        return ImatrixFile(entries, (dataset,) if dataset else (), n_chunks, 0)

    def entry(self) -> tuple[str, ImatrixEntry]:
        import numpy as np

        name = self.take(self.integer()).decode("utf-8", "replace")
        calls, length = self.integer(), self.integer()
        sums = np.frombuffer(self.take(4 * length), "<f4").astype(np.float32)
        return name, _checked(self.path, name, sums, np.array([max(calls, 1)], np.float32))

    def integer(self) -> int:
        (value,) = struct.unpack("<i", self.take(4))
        return int(value)

    def take(self, length: int) -> bytes:
        start, self.position = self.position, self.position + length
        if length < 0 or self.position > len(self.data):
            raise _is_none(self.path, "it begins neither as GGUF nor as a whole file of the older format")
        return self.data[start : self.position]


# ---- and a model -----------------------------------------------------------------------------------


def require_fit(imatrix: ImatrixFile, header: Header, path: Path) -> None:
    """See that an importance matrix was collected on this model, or one of the same shape.

    Args:
        header: of the model.
        path: of the importance matrix, for the message.

    Raises:
        UsageError: it was not; names the tensors.
    """
    tensors = {tensor.name: tensor for tensor in header.tensors}
    hint = "collect one on this model: --imatrix auto"
    strange = [name for name in imatrix.entries if name not in tensors]
    if strange:
        raise UsageError(
            f"the importance matrix {str(path)!r} is of another model",
            why=f"{header.path.name} has no {_listed(strange)}",
            hint=hint,
        )
    pairs = [(tensors[name], entry) for name, entry in imatrix.entries.items()]
    wrong = [_misfit(tensor, entry) for tensor, entry in pairs if entry.sums.size != _n_columns(tensor)]
    if wrong:
        raise UsageError(
            f"the importance matrix {str(path)!r} is of another model", why="; ".join(wrong[:_SHOWN]), hint=hint
        )


def _n_columns(tensor: Tensor) -> int:
    """Of all its matrices."""
    return tensor.shape[0] * prod(tensor.shape[2:])


def _misfit(tensor: Tensor, entry: ImatrixEntry) -> str:
    return f"{tensor.name} has {_n_columns(tensor):,} columns in the model, {entry.sums.size:,} in the file"


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")


def unused_experts(imatrix: ImatrixFile) -> dict[str, int]:
    """Tensor -> how many of its experts the calibration text never reached; only those where there are some."""
    found = {name: int((entry.counts == 0).sum()) for name, entry in imatrix.entries.items()}
    return {name: count for name, count in found.items() if count}

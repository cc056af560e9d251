"""A reader of importance matrices in llama.cpp's GGUF and in its older binary format.

Files are untrusted: every length is checked before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.errors import BadModelError, ModelNotFoundError, UsageError
from llmrun.gguf.header import Header, Tensor
from llmrun.gguf.reader import read_part

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, N_CHUNKS, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"


@dataclass(frozen=True, slots=True)
class ImatrixEntry:
    """The sums of one tensor."""

    sums: Floats  # of the squared inputs of each column, [matrices, columns]
    counts: Floats  # summed rows of each expert; one number if all matrices get the same rows

    def means(self) -> Floats:
        """Return the mean squares of all matrices in order; 1 for unused ones, as in llama-quantize.

        A column that got only zeros has the smallest weight of its matrix: llama.cpp writes zeros for a block without
        any weight.
        """
        import numpy as np

        counts = np.rint(self.counts).astype(np.float32)[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.where(counts > 0, self.sums / counts, np.float32(1))
        means = np.ascontiguousarray(means, np.float32)
        smallest = np.where(means > 0, means, np.inf).min(axis=1, keepdims=True)
        smallest[~np.isfinite(smallest)] = 1
        return np.where(means > 0, means, smallest.astype(np.float32)).reshape(-1)


@dataclass(frozen=True, slots=True)
class ImatrixFile:
    """An importance matrix."""

    entries: Mapping[str, ImatrixEntry]  # by tensor
    datasets: tuple[str, ...]  # names of the texts that it was collected on; untrusted
    n_chunks: int  # pieces of text; 0 if the file does not state it
    chunk_size: int  # tokens of each; 0 if the file does not state it

    def weights(self) -> dict[str, Floats]:
        """Return tensor -> weight of each column of its matrices."""
        return {name: entry.means() for name, entry in self.entries.items()}


def read_imatrix(path: Path) -> ImatrixFile:
    """Read a file of either format.

    Raises:
        ModelNotFoundError: the file can't be read.
        UsageError: the file is not an importance matrix.
        BadModelError: the importance matrix is damaged.
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
    header = read_part(path, arrays=(DATASETS,))
    tensors = {tensor.name: tensor for tensor in header.tensors}
    names = [name.removesuffix(SUMS) for name in tensors if name.endswith(SUMS)]
    if not names:
        architecture = header.metadata.get("general.architecture")
        why = f"it is a model ({architecture})" if isinstance(architecture, str) else "it is GGUF of something else"
        raise _not_one(path, why)
    with _open(path) as file:
        entries = {name: _entry(header, file, tensors, name) for name in names}
    datasets = header.metadata.get(DATASETS)
    texts = datasets if isinstance(datasets, tuple) else ()
    return ImatrixFile(
        entries,
        tuple(text.decode("utf-8", "replace") for text in texts if isinstance(text, bytes)),
        header.integer(N_CHUNKS) or 0,
        header.integer(CHUNK_SIZE) or 0,
    )


def _entry(header: Header, file: Any, tensors: Mapping[str, Tensor], name: str) -> ImatrixEntry:
    if name + COUNTS not in tensors:
        raise _damaged(header.path, f"{name} has sums but no counts")
    sums, counts = (_numbers(header, file, tensors[name + end]) for end in (SUMS, COUNTS))
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
        raise _damaged(path, f"{name} holds impossible sums of squares or counts")
    return ImatrixEntry(sums.reshape(counts.size, -1), counts)


def _damaged(path: Path, why: str) -> BadModelError:
    return BadModelError(f"the importance matrix {str(path)!r} is damaged", why=why, hint="collect it again")


def _not_one(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{str(path)!r} is not an importance matrix",
        why=why,
        hint="llama-imatrix makes one, and so does --imatrix auto",
    )


# ---- the older format ------------------------------------------------------------------------------


class _Legacy:
    """A cursor over a file: count, then name, calls, length and numbers of each entry, then the text's name.

    The numbers are means times calls, so the calls are the count.
    """

    def __init__(self, path: Path) -> None:
        with _open(path) as file:
            self.data: bytes = file.read()
        self.path, self.position = path, 0

    def read(self) -> ImatrixFile:
        count = self.integer()
        if not 1 <= count <= len(self.data) // 16:
            raise _not_one(self.path, "it begins neither as GGUF nor as the older format")
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
            raise _not_one(self.path, "it begins neither as GGUF nor as a whole file of the older format")
        return self.data[start : self.position]

"""Reads llama.cpp's importance matrix for whoever quantizes: how much each column of a matrix counts.

Owns what the values are made of; must not know how they are collected. The file is as untrusted as a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrun.errors import BadModelError, UsageError
from llmrun.gguf.header import Header, Tensor
from llmrun.gguf.reader import read_part

_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNKS = "imatrix.datasets", "imatrix.chunk_count"


@dataclass(frozen=True)
class Imatrix:
    """An importance matrix.

    Attributes:
        weights: tensor -> mean square of what each column is multiplied with, float32; of experts one after another.
        dataset: what it was collected on, "" when the file does not say.
        n_chunks: of how many pieces of text; 0 when the file does not say.
    """

    weights: dict[str, Any]
    dataset: str
    n_chunks: int


def read_imatrix(path: Path) -> Imatrix:
    """Read a file, and divide the sums in it by their counts as llama-quantize does.

    Raises:
        UsageError: it is not an importance matrix.
        BadModelError: it is damaged.
        ModelNotFoundError: it can't be read.
    """
    header = _read_header(path)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    names = [name.removesuffix(_SUMS) for name in tensors if name.endswith(_SUMS)]
    if not names:
        raise UsageError(f"{str(path)!r} is not an importance matrix", why="no tensor in it ends in .in_sum2")
    weights = {}
    with path.open("rb") as file:
        for name in names:
            if name + _COUNTS not in tensors:
                raise BadModelError(f"the importance matrix {str(path)!r} is damaged", why=f"{name} has no counts")
            sums, counts = (_numbers(file, header, tensors[name + end]) for end in (_SUMS, _COUNTS))
            weights[name] = _means(sums, counts, f"{path}: {name}")
    datasets = header.metadata.get(_DATASETS)
    first = datasets[0] if isinstance(datasets, tuple) and datasets else b""
    return Imatrix(weights, first.decode("utf-8", "replace"), header.integer(_CHUNKS) or 0)


def _read_header(path: Path) -> Header:
    try:
        return read_part(path, arrays=(_DATASETS,))
    except BadModelError as error:
        hint = "llama-imatrix --in-file OLD.dat -o NEW.gguf makes one of an old .dat file"
        raise UsageError(f"{str(path)!r} is not an importance matrix in GGUF", why=error.why, hint=hint) from None


def _numbers(file: Any, header: Header, tensor: Tensor) -> Any:
    import numpy as np

    if tensor.type != "F32":
        raise BadModelError(
            f"the importance matrix {str(header.path)!r} is damaged", why=f"{tensor.name} is {tensor.type}, not F32"
        )
    file.seek(tensor.offset)
    return np.frombuffer(file.read(tensor.n_bytes), np.float32)


def _means(sums: Any, counts: Any, where: str) -> Any:
    """The sums divided by how many there were, of each expert; what was never used counts 1."""
    import numpy as np

    if not len(counts) or len(sums) % len(counts):
        raise BadModelError(f"{where} has {len(sums)} sums for {len(counts)} counts")
    counts = np.rint(counts).astype(np.float32)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, sums.reshape(len(counts), -1) / counts, np.float32(1))
    if not np.isfinite(means).all():
        raise BadModelError(f"{where} holds numbers that are not finite")
    return np.ascontiguousarray(means, np.float32).reshape(-1)

"""Writer of importance matrices in llama.cpp's GGUF format, and the check that one belongs to a model.

Must not know reading (gguf/imatrix.py), collection or use.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from llmrun.convert.checkpoint import array_source
from llmrun.convert.gguf_file import OutputTensor, header_bytes
from llmrun.errors import UsageError, listed
from llmrun.gguf.header import Header
from llmrun.gguf.imatrix import CHUNK_SIZE, COUNTS, DATASETS, N_CHUNKS, SUMS, ImatrixFile
from llmrun.gguf.reader import DEFAULT_ALIGNMENT, padded
from llmrun.models.store import new_file

_MAX_NAME_BYTES = 63 - len(SUMS)  # GGML_MAX_NAME
_SHOWN = 3


def write_imatrix(target: Path, imatrix: ImatrixFile) -> None:
    """Write a file for llama-quantize; after an error the target is unchanged.

    Raises:
        DiskFullError: there is no room for the file.
        ResourceError: the file can't be written there.
        UsageError: a tensor's name is too long for the format.
    """
    tensors = []
    for name, entry in sorted(imatrix.entries.items()):
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise UsageError(f"tensor {name!r} has a name too long for an importance matrix")
        tensors.append(OutputTensor(name + SUMS, "F32", array_source(name, entry.sums)))
        tensors.append(OutputTensor(name + COUNTS, "F32", array_source(name, entry.counts.reshape(-1, 1))))
    metadata = {
        "general.type": "imatrix",
        DATASETS: list(imatrix.datasets),
        N_CHUNKS: imatrix.n_chunks,
        CHUNK_SIZE: imatrix.chunk_size,
    }
    header = header_bytes(metadata, tensors)
    new_file.require_room(target, len(header) + sum(tensor.n_bytes + DEFAULT_ALIGNMENT for tensor in tensors))
    with new_file.arriving(target) as path, path.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            for chunk in tensor.data():
                file.write(chunk.astype("<f4").tobytes())
            file.write(b"\0" * (padded(tensor.n_bytes) - tensor.n_bytes))


def require_fit(imatrix: ImatrixFile, header: Header, path: Path) -> None:
    """Raise UsageError unless an importance matrix is of this model, or of one of the same shape.

    Args:
        header: of the model.
        path: of the importance matrix, for the message.
    """
    tensors = {tensor.name: tensor for tensor in header.tensors}
    hint = "collect one on this model: --imatrix auto"
    unknown = [name for name in imatrix.entries if name not in tensors]
    if unknown:
        raise UsageError(
            f"the importance matrix {str(path)!r} is of another model",
            why=f"{header.path.name} has no {listed(unknown, _SHOWN)}",
            hint=hint,
        )
    columns = {name: tensors[name].shape[0] * prod(tensors[name].shape[2:]) for name in imatrix.entries}
    misfits = [
        f"{name} has {columns[name]:,} columns in the model, {entry.sums.size:,} in the file"
        for name, entry in imatrix.entries.items()
        if entry.sums.size != columns[name]
    ]
    if misfits:
        raise UsageError(
            f"the importance matrix {str(path)!r} is of another model", why="; ".join(misfits[:_SHOWN]), hint=hint
        )


def unused_experts(imatrix: ImatrixFile) -> dict[str, int]:
    """Return tensor -> number of experts that the calibration text never reached, if any."""
    found = {name: int((entry.counts == 0).sum()) for name, entry in imatrix.entries.items()}
    return {name: count for name, count in found.items() if count}

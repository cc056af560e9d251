"""What is compared of a converted file: every key and tensor, whatever their order."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

GOLDENS = Path(__file__).parents[1] / "convert/goldens.json"
IDS = (3, 70, 71, 260, 9, 42, 13, 5, 80, 81, 11, 100)  # longer than the windows of the tiny models
COLUMNS = 16  # every so many logits are kept


def contents(path: Path) -> dict[str, Any]:
    """Key -> value (long ones as a hash), and tensor -> type, shape and hash; read by gguf-py."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    keys = {
        name: [field.types[0].name, _short(field.contents())]
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    tensors = {
        tensor.name: f"{tensor.tensor_type.name} {[int(n) for n in tensor.shape]} {_hash(tensor.data.tobytes())}"
        for tensor in reader.tensors
    }
    return {"keys": dict(sorted(keys.items())), "tensors": dict(sorted(tensors.items()))}


def _short(value: Any) -> Any:
    return f"sha256 {_hash(repr(value).encode())}" if isinstance(value, list) and len(value) > 8 else value


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

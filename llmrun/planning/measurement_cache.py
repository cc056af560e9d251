"""Files of measurements: entries by key, the latest first, and the key of a model on this machine.

Must not know the measurements. Every answer waits for this, so it reads one small file and imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llmrun.gguf.header import Header
from llmrun.planning.hardware import Hardware
from llmrun.protocol.codec import load_json
from llmrun.protocol.llama_folder import library_folder
from llmrun.storage import alone_in, disk_errors, write_whole

_SCHEMA = 1
_MOST_BYTES = 1 << 20
_MOST_ENTRIES = 40
_LIBRARIES = ("libggml-cpu*.so", "libllama.so", "libggml-cpu*.dylib", "libllama.dylib", "ggml-cpu*.dll", "llama.dll")


def model_key(header: Header, hardware: Hardware) -> dict[str, Any]:
    """Return the facts that speed depends on as JSON data: the machine and the model's shape, not its name."""
    return {**machine_key(hardware), "shape": _as_json(_shape(header))}


def machine_key(hardware: Hardware) -> dict[str, Any]:
    """Return the part of a key that all models on this machine share."""
    return {"machine": _as_json(hardware.fingerprint), "build": _as_json(_build())}


def entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file; none if it is missing, damaged or of another version."""
    try:
        with path.open("rb") as file:
            data = load_json(file.read(_MOST_BYTES))
        if data["schema"] != _SCHEMA:
            return []
        return [entry for entry in data["entries"] if isinstance(entry, dict)]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def find(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Return the entry of a key; None without one."""
    return next((entry for entry in entries(path) if entry.get("key") == key), None)


def keep(path: Path, key: dict[str, Any], entry: dict[str, Any]) -> None:
    """Write an entry; it replaces that of the same key.

    Raises:
        LlmrunError: the folder can't be written.
    """
    with _writing(path):
        _write(path, [{"key": key, **entry}, *_others(path, key)][:_MOST_ENTRIES])


def drop(path: Path, key: dict[str, Any]) -> bool:
    """Remove the entry of a key, and return whether there was one. Raises as keep()."""
    if find(path, key) is None:
        return False
    with _writing(path):
        _write(path, _others(path, key))
    return True


def _others(path: Path, key: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in entries(path) if entry.get("key") != key]


def _as_json(value: Any) -> Any:
    """Return a value as a file returns it: tuples become lists, and keys text."""
    return load_json(json.dumps(value))


def _shape(header: Header) -> dict[str, Any]:
    return {
        "architecture": header.architecture,
        "layers": header.n_layers,
        "width": header.n_embd,
        "heads": header.n_heads,
        "kv_heads": header.n_kv_heads,
        "head_length": [header.key_length, header.value_length],
        "window": header.sliding_window,
        "experts": [header.n_experts, header.n_experts_used],
        "vocabulary": header.n_vocab,
        "types": header.bytes_per_type,
    }


def _build() -> list[list[Any]]:
    """Return names, sizes and times of llama.cpp's libraries, which identify the build without loading it."""
    found = []
    folder = library_folder()
    for pattern in _LIBRARIES:
        for library in folder.glob(pattern) if folder else ():
            with suppress(OSError):
                status = library.stat()
                found.append([library.name, status.st_size, int(status.st_mtime)])
    return sorted(found)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Keep other threads and processes from changing a file after it was read here."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(path.parent):
            yield


def _write(path: Path, found: list[dict[str, Any]]) -> None:
    """Write the entries; remove the file if there are none, so that its presence means entries."""
    if found:
        write_whole(path, json.dumps({"schema": _SCHEMA, "entries": found}))
    else:
        path.unlink(missing_ok=True)

"""The identity of a model's file, for saved chats and recordings, and its checksum."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmrun.gguf import filenames
from llmrun.models.store.installed import OLLAMA, InstalledModel

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Identity of the model that answered."""

    name: str  # as `llmrun list` shows it
    sha256: str = ""  # of its file; "" when unknown, then the fields below identify it
    path: str = ""  # of its file, or the URL of the server that answered
    size: int = 0  # in bytes
    modified: float = 0.0  # seconds since 1970

    @property
    def server(self) -> str:
        """URL of the server that answered; "" for a local model."""
        return self.path if "://" in self.path else ""


def fingerprint_file(name: str, file: Path) -> ModelFingerprint:
    """Return the fingerprint of a model's file; an empty name becomes its path.

    In the hub's cache a file's real name is its sha256.
    """
    real = file.resolve()
    status = real.stat()
    sha256 = real.name if _SHA256.fullmatch(real.name) else ""
    path = str(file.absolute())
    return ModelFingerprint(name or path, sha256, path, status.st_size, status.st_mtime)


OnBytes = Callable[[int], None]
"""Called with the number of bytes read since the last call."""

State = Literal["ok", "damaged", "unknown"]


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """Result of a model's checksum test."""

    model: InstalledModel
    state: State  # "unknown" without a known checksum
    text: str  # for users


def sha256_of(path: Path, on_bytes: OnBytes = lambda n_bytes: None) -> str:
    """Return a file's sha256 in lower-case hex. Raises OSError if it can't be read."""
    import hashlib  # the start of `llmrun run` does without

    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while n_bytes := file.readinto(buffer):
            digest.update(buffer[:n_bytes])
            on_bytes(n_bytes)
    return digest.hexdigest()


def verify(model: InstalledModel, on_bytes: OnBytes = lambda n_bytes: None) -> VerificationResult:
    """Compare the sha256 of all a model's bytes with the one they are stored under."""
    for name in filenames.all_parts(model.path.name):
        path = model.path.with_name(name)
        promised = promised_sha256(model, path)
        if promised is None:
            return VerificationResult(model, "unknown", f"no checksum of {name} is known")
        try:
            actual = sha256_of(path, on_bytes)
        except OSError as error:
            return VerificationResult(model, "damaged", f"{name} can't be read: {error.strerror or error}")
        if actual != promised:
            return VerificationResult(model, "damaged", f"the sha256 of {name} is {actual}, expected {promised}")
    return VerificationResult(model, "ok", "sha256 matches")


def promised_sha256(model: InstalledModel, path: Path) -> str | None:
    """Return the hash that a file's bytes are stored under; None when its path has none.

    In the hub's cache a name leads to blobs/<sha256>. Follow one link only: the blob may itself be a link into the
    hub's shared store, which uses another hash.
    """
    if model.place == OLLAMA:
        name = path.name.removeprefix("sha256-")
    else:
        try:
            name = Path(os.readlink(path)).name  # noqa: PTH115 - the text, not what it leads to
        except OSError:
            return None
    return name if _SHA256.fullmatch(name) else None

"""Identity of the model that answered, for saved chats and recordings. Must not know where models are stored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SHA256 = re.compile(r"[0-9a-f]{64}")


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

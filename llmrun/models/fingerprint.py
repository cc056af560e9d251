"""Which model gave an answer, as saved chats and recordings remember it. Must not know how models are found."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Which model answered.

    Attributes:
        name: as `llmrun list` shows it.
        sha256: of its file; "" where nobody knows it, then the three below tell it from another.
        path: of its file; the URL of the server that answered, where it was one.
        size: in bytes.
        modified: seconds since 1970.
    """

    name: str
    sha256: str = ""
    path: str = ""
    size: int = 0
    modified: float = 0.0

    @property
    def server(self) -> str:
        """URL of the server that answered; "" where the model was loaded here."""
        return self.path if "://" in self.path else ""


def file_used(name: str, file: Path) -> ModelFingerprint:
    """What is remembered of a model's file; "" names it by its path.

    In the hub's cache a file's real name is its sha256.
    """
    real = file.resolve()
    status = real.stat()
    sha256 = real.name if _SHA256.fullmatch(real.name) else ""
    path = str(file.absolute())
    return ModelFingerprint(
        name or path, sha256, path, status.st_size, status.st_mtime
    )  # found again from every folder

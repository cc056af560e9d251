"""The models on this disk, as clients list them.

Owns what is read of their files, once for each; must not know HTTP.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from llmrun.config import Settings
from llmrun.errors import LlmrunError, ModelNotFoundError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.models.hashing import promised_sha256
from llmrun.models.store.installed import Installed
from llmrun.models.store.store import all_models
from llmrun.server.protocols.ollama_models import ModelDescription


class ModelCatalog:
    """Lists models; slow enough to be asked in another thread than the event loop's.

    Args:
        settings: where they lie.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._headers: dict[tuple[Path, float], Header] = {}

    def created(self) -> dict[str, int]:
        """Names, and when each file was written, Unix time."""
        return {each.name: int(each.modified) for each in all_models(self._settings)}

    def described(self) -> list[ModelDescription]:
        """All that can be read."""
        found: list[ModelDescription] = []
        for each in all_models(self._settings):
            try:
                found.append(_describe(each, self._header(each)))
            except (LlmrunError, OSError):
                continue  # damaged, or just being removed: who asks for it is told
        return found

    def find(self, name: str) -> tuple[ModelDescription, Header]:
        """A model and its header.

        Raises:
            ModelNotFoundError: none is called so.
            BadModelError: its file is damaged.
        """
        wanted = name.removesuffix(":latest")
        for each in all_models(self._settings):
            if each.name == wanted:
                header = self._header(each)
                return _describe(each, header), header
        raise ModelNotFoundError(f"no model is called {name[:200]!r}", hint="GET /api/tags names those there are")

    def _header(self, installed: Installed) -> Header:
        key = (installed.path, installed.modified)
        if key not in self._headers:
            self._headers[key] = read_header(installed.path)
        return self._headers[key]


def _describe(installed: Installed, header: Header) -> ModelDescription:
    return ModelDescription(
        name=installed.name,
        modified=installed.modified,
        size=installed.size,
        digest=_digest(installed),
        architecture=header.architecture,
        parameters=header.readable_parameters,
        quantization=installed.quant or header.quant,
    )


def _digest(installed: Installed) -> str:
    """The sha256 that a file is stored under, else one of what tells it from others."""
    known = f"{installed.path} {installed.size} {installed.modified}"
    return promised_sha256(installed, installed.path) or hashlib.sha256(known.encode()).hexdigest()

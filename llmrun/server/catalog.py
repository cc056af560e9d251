"""The list of models on this disk. Reads each header once; must not know HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from llmrun.config import Settings
from llmrun.errors import LlmrunError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.models.hashing import promised_sha256
from llmrun.models.store.installed import LINK, Installed
from llmrun.models.store.store import all_models
from llmrun.server.http_errors import model_not_found
from llmrun.server.protocols.ollama_models import ModelDescription


class ModelCatalog:
    """Lists models; too slow for the event loop's thread.

    Args:
        files: served files outside the store, by their names.
    """

    def __init__(self, settings: Settings, files: Mapping[str, Path] = MappingProxyType({})) -> None:
        self._settings, self._files = settings, files
        self._headers: dict[Path, tuple[float, Header]] = {}  # and the time of the file

    def created(self) -> dict[str, int]:
        """Return names and Unix times of files."""
        return {each.name: int(each.modified) for each in self._models()}

    def described(self) -> list[ModelDescription]:
        """Return the models whose headers are readable."""
        found: list[ModelDescription] = []
        for each in self._models():
            try:
                found.append(_describe(each, self._header(each)))
            except (LlmrunError, OSError):
                continue  # damaged, or just removed; a request for it gets the error
        return found

    def trained_contexts(self) -> dict[str, int]:
        """Return the context window that each model was trained with, of those whose headers are readable."""
        found: dict[str, int] = {}
        for each in self._models():
            with suppress(LlmrunError, OSError):
                found[each.name] = self._header(each).n_ctx_train
        return found

    def find(self, name: str) -> tuple[ModelDescription, Header]:
        """Return a model and its header.

        Raises:
            ModelNotFoundError: no model has this name.
            BadModelError: its file is damaged.
        """
        name = name.removesuffix(":latest")
        for each in self._models():
            if each.name == name:
                header = self._header(each)
                return _describe(each, header), header
        raise model_not_found(name, "/api/tags")

    def _models(self) -> list[Installed]:
        served = (_outside(name, path) for name, path in self._files.items() if path.is_file())
        return [*served, *all_models(self._settings)]

    def _header(self, installed: Installed) -> Header:
        modified, header = self._headers.get(installed.path, (None, None))
        if header is None or modified != installed.modified:
            header = read_header(installed.path)
            self._headers[installed.path] = installed.modified, header
        return header


def _outside(name: str, path: Path) -> Installed:
    stat = path.stat()
    return Installed(name, "", path.name, "", stat.st_size, "", path, LINK, stat.st_mtime)


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
    """Return the SHA-256 in the file's name in the store, otherwise a hash of path, size and time."""
    identity = f"{installed.path} {installed.size} {installed.modified}"
    return promised_sha256(installed, installed.path) or hashlib.sha256(identity.encode()).hexdigest()

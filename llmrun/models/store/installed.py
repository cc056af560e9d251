"""An installed model as plain data; store.py (the cache) and other_programs.py find them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HUB_CACHE = "hub cache"
LINK = "link"
OLLAMA = "Ollama"
LM_STUDIO = "LM Studio"
OWN_FOLDER = "models.folders"


class Layer(NamedTuple):
    """A file of a model in Ollama's store, besides its weights."""

    kind: str  # the end of its media type, such as "adapter"
    path: Path


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """Model on this disk."""

    name: str  # to run it, e.g. "owner/repo:Q4_K_M"
    repository: str  # "owner/repo", "" for a plain link and most of Ollama's
    filename: str  # in the repository; of a split model the first part's
    revision: str  # commit, "" outside the hub's cache
    size: int  # of all its parts, in bytes
    quant: str  # e.g. "Q4_K_M", "" when unknown
    path: Path  # of the (first) file
    place: str = HUB_CACHE  # HUB_CACHE or LINK, which llmrun may change; the others it may not
    modified: float = 0.0  # time of the last write, in seconds since 1970
    layers: tuple[Layer, ...] = ()  # that Ollama has besides the weights

    @property
    def projector(self) -> Path | None:
        """The projector in Ollama's store."""
        return next((layer.path for layer in reversed(self.layers) if layer.kind == "projector"), None)

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to llmrun or the shared cache, not to another program or a folder of the user's."""
        return self.place in (HUB_CACHE, LINK)


def measure(parts: Iterable[Path]) -> tuple[int, float] | None:
    """Return `size` and `modified` of InstalledModel, of all its files together; None when one is missing."""
    try:
        files = [os.stat(part) for part in parts]  # noqa: PTH116 - five times as fast as Path.stat()
    except OSError:
        return None
    return sum(file.st_size for file in files), max(file.st_mtime for file in files)

"""Where a model lies that somebody named: found without the network.

Owns what a name means on this disk; must not know what becomes of the file.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from llmrun.config import Settings
from llmrun.errors import ModelNotFoundError
from llmrun.models.registry import ModelSpec, load_catalogue, resolve
from llmrun.models.store.store import Store


@dataclass(frozen=True, slots=True)
class Located:
    """What a name means, and where its file is; path is None while the model is not on this disk."""

    spec: ModelSpec
    path: Path | None


def locate(name: str, settings: Settings) -> Located:
    """Find a model without the network.

    Raises:
        ModelNotFoundError: nothing is called that.
        UsageError: the name is invalid.
    """
    spec = resolve(name, load_catalogue())
    if spec.path is not None:
        return Located(spec, spec.path)
    installed = Store(settings).find(spec)
    return Located(spec, installed.path if installed else None)


def not_on_disk(name: str) -> ModelNotFoundError:
    """The error for a model that would have to be downloaded first."""
    return ModelNotFoundError(f"{name} is not on this disk", hint=f"llmrun pull {shlex.quote(name)}")

"""What Ollama's protocol tells about models: /api/tags, /api/show, /api/ps and /api/version. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

VERSION = {"version": "0.12.6"}
"""The body of /api/version: of the protocol, not of llmrun. VS Code refuses less than 0.6.4."""

_NEVER = 253_402_300_799  # the last second of the year 9999


class ModelDescription(NamedTuple):
    """A model, as Ollama's clients want it told.

    Attributes:
        modified: Unix time of its file.
        size: of its file, in bytes.
        digest: of its file, or whatever names this very file.
        architecture: e.g. "llama".
        parameters: e.g. "135M".
        quantization: e.g. "Q4_1".
    """

    name: str
    modified: float
    size: int
    digest: str
    architecture: str
    parameters: str
    quantization: str


class RunningModel(NamedTuple):
    """A loaded model.

    Attributes:
        expires: Unix time when it goes if nobody asks; None is never.
        size: of the memory that it takes, in bytes.
        size_vram: part of that on a GPU.
        n_ctx: context window of one client.
    """

    model: ModelDescription
    expires: float | None
    size: int
    size_vram: int
    n_ctx: int


def tags(models: Sequence[ModelDescription]) -> dict[str, Any]:
    """The body of /api/tags."""
    return {"models": [_listed(model) | {"modified_at": unix_time(model.modified)} for model in models]}


def running(models: Sequence[RunningModel]) -> dict[str, Any]:
    """The body of /api/ps."""
    return {
        "models": [
            _listed(each.model)
            | {
                "size": each.size,
                "size_vram": each.size_vram,
                "context_length": each.n_ctx,
                "expires_at": unix_time(_NEVER if each.expires is None else each.expires),
            }
            for each in models
        ]
    }


def show(
    model: ModelDescription, *, n_ctx_train: int, template: str, thinks: bool, embeds: bool = False, sees: bool = False
) -> dict[str, Any]:
    """The body of /api/show.

    Args:
        n_ctx_train: context window that it was trained on.
        template: its chat template, "" where it has none.
        thinks: it can think before it answers.
        embeds: it makes vectors, and does not answer.
        sees: it can look at pictures.
    """
    others = {"tools": bool(template), "thinking": thinks, "vision": sees}
    answers = ["completion", *(name for name, has in others.items() if has)]
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": _details(model),
        "model_info": {
            "general.architecture": model.architecture,
            f"{model.architecture}.context_length": n_ctx_train,
        },
        "capabilities": ["embedding"] if embeds else answers,
        "modified_at": unix_time(model.modified),
    }


def _listed(model: ModelDescription) -> dict[str, Any]:
    # Ollama lists no name without a tag: Open WebUI adds ":latest" to one before it looks for it in the list.
    name = model.name if ":" in model.name else f"{model.name}:latest"
    return {
        "name": name,
        "model": name,
        "size": model.size,
        "digest": model.digest,
        "details": _details(model),
    }


def _details(model: ModelDescription) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": model.architecture,
        "families": [model.architecture],
        "parameter_size": model.parameters,
        "quantization_level": model.quantization,
    }


def unix_time(seconds: float) -> str:
    """A Unix time as Ollama writes it."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")

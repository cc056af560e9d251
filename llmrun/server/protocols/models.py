"""The list of models in OpenAI's and Anthropic's protocol: /v1/models. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llmrun.server.protocols.ollama_models import unix_time


class ListedModel(NamedTuple):
    """A name that requests may have."""

    name: str
    created: int  # Unix time of its file, 0 if unknown
    n_ctx: int  # context window in tokens, 0 if unknown
    alias_of: str = ""  # the name of the same model, if this is another name of it


def openai_model(model: ListedModel) -> dict[str, Any]:
    """Return an entry with the context window as vLLM and OpenRouter name it."""
    window = {"context_length": model.n_ctx, "max_model_len": model.n_ctx} if model.n_ctx else {}
    alias = {"alias_of": model.alias_of} if model.alias_of else {}
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "llmrun", **window, **alias}


def openai_models(models: Sequence[ListedModel]) -> dict[str, Any]:
    return {"object": "list", "data": [*map(openai_model, models)]}


def codex_models(models: Sequence[ListedModel]) -> dict[str, Any]:
    """Return the list for Codex, which reads `models` alone: empty, since an entry would replace Codex's own prompt.

    Codex 0.169 takes no entry without base_instructions, and logs an error for a list without `models`.
    """
    return {**openai_models(models), "models": []}


def anthropic_model(model: ListedModel) -> dict[str, Any]:
    names = {"type": "model", "id": model.name, "display_name": model.name}
    times = {"created_at": unix_time(model.created), "lifecycle": "active"}
    return {**names, **times, "max_input_tokens": model.n_ctx or None}


def anthropic_models(models: Sequence[ListedModel]) -> dict[str, Any]:
    """Return all models as one page."""
    ends = {"first_id": models[0].name, "last_id": models[-1].name} if models else {"first_id": None, "last_id": None}
    return {"data": [*map(anthropic_model, models)], "has_more": False, **ends}

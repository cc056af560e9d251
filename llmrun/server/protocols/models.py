"""Models in lists and descriptions: of OpenAI, Anthropic and Codex (/v1/models), and of Ollama (/api). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple
from urllib.parse import quote

from llmrun.protocol.media import Modality

VERSION = {"version": "0.13.4"}
"""The response of /api/version: of the protocol, not of llmrun.

VS Code refuses less than 0.6.4, and Codex less than 0.13.4, the first with /v1/responses.
"""

_LONGEST_SHOWN = 256  # characters of a name that a client made up
_NEVER = 253_402_300_799  # the last second of the year 9999


class ModelDescription(NamedTuple):
    """A model in Ollama's terms."""

    name: str
    modified: float  # Unix time of its file
    size: int  # bytes of its file
    digest: str  # of its file, or another text that identifies the file
    architecture: str  # e.g. "llama"
    parameters: str  # e.g. "135M"
    quantization: str  # e.g. "Q4_1"


def tags(models: Sequence[ModelDescription]) -> dict[str, Any]:
    """Return the response of /api/tags."""
    return {"models": [_listed(model) | {"modified_at": unix_time(model.modified)} for model in models]}


def running(model: ModelDescription, *, expires: float | None, size: int, size_vram: int, n_ctx: int) -> dict[str, Any]:
    """Return a loaded model in the response of /api/ps.

    Args:
        expires: Unix time when it is unloaded if it stays idle; None: never.
        size: bytes of memory.
        size_vram: bytes of these on a GPU.
        n_ctx: context window of one client.
    """
    return _listed(model) | {
        "size": size,
        "size_vram": size_vram,
        "context_length": n_ctx,
        "expires_at": unix_time(_NEVER if expires is None else expires),
    }


def show(
    model: ModelDescription,
    *,
    n_ctx_train: int,
    template: str,
    thinks: bool,
    embeds: bool = False,
    modalities: frozenset[Modality] = frozenset(),
) -> dict[str, Any]:
    """Return the response of /api/show.

    Args:
        template: its chat template; "" for none.
        thinks: it can reason before the answer.
        embeds: it computes vectors, and does not generate.
        modalities: kinds of files that it reads.
    """
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": _details(model),
        "model_info": {
            "general.architecture": model.architecture,
            f"{model.architecture}.context_length": n_ctx_train,
        },
        "capabilities": capabilities(has_template=bool(template), thinks=thinks, embeds=embeds, modalities=modalities),
        "modified_at": unix_time(model.modified),
    }


def capabilities(*, has_template: bool, thinks: bool, embeds: bool, modalities: frozenset[Modality]) -> list[str]:
    """Return what a model can do, in Ollama's words. Arguments as those of show()."""
    if embeds:
        return ["embedding"]
    others = {"tools": has_template, "thinking": thinks}
    others |= {"vision": "image" in modalities, "audio": "audio" in modalities}
    return ["completion", *(name for name, has in others.items() if has)]


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
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


class ModelFacts(NamedTuple):
    """Facts in the header of a model's file, and in the projector beside it."""

    n_ctx_train: int = 0
    n_vocab: int = 0
    n_embd: int = 0
    n_parameters: int = 0
    weight_bytes: int = 0
    quant: str = ""
    has_template: bool = False
    thinks: bool = False
    embeds: bool = False
    modalities: frozenset[Modality] = frozenset()

    @property
    def capabilities(self) -> list[str]:
        """What the model can do, in Ollama's words and in llama-server's."""
        found = capabilities(
            has_template=self.has_template, thinks=self.thinks, embeds=self.embeds, modalities=self.modalities
        )
        return [*found, "multimodal"] if self.modalities else found


class ListedModel(NamedTuple):
    """A name that requests may have."""

    name: str
    created: int  # Unix time of its file, 0 if unknown
    n_ctx: int  # context window in tokens, 0 if unknown
    alias_of: str = ""  # the name of the same model, if this is another name of it
    facts: ModelFacts | None = None  # None if its file can't be read


def openai_model(model: ListedModel) -> dict[str, Any]:
    """Return an entry with the context window as vLLM and OpenRouter name it, and llama-server's `meta`."""
    window = {"context_length": model.n_ctx, "max_model_len": model.n_ctx} if model.n_ctx else {}
    alias = {"alias_of": model.alias_of} if model.alias_of else {}
    meta = {"meta": _meta(model.facts, model.n_ctx)} if model.facts is not None else {}
    entry = {"id": model.name, "object": "model", "created": model.created, "owned_by": "llmrun"}
    return {**entry, **window, **alias, **meta}


def _meta(facts: ModelFacts, n_ctx: int) -> dict[str, Any]:
    return {
        "n_vocab": facts.n_vocab,
        "n_ctx": n_ctx,
        "n_ctx_train": facts.n_ctx_train,
        "n_embd": facts.n_embd,
        "n_params": facts.n_parameters,
        "size": facts.weight_bytes,
        "ftype": facts.quant,
    }


def openai_models(models: Sequence[ListedModel]) -> dict[str, Any]:
    """Return the list, and `models` as llama-server has it: clients find there what a model can do."""
    described = [
        {"name": each.name, "model": each.name, "type": "model", "capabilities": each.facts.capabilities}
        for each in models
        if each.facts is not None
    ]
    return {"object": "list", "data": [*map(openai_model, models)], "models": described}


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


def shown_name(named: str, model: str) -> str:
    """Return the model's name for an answer: the one in the request, by which clients and proxies account for it.

    Args:
        named: in the request; "" for none.
        model: the model's own name.
    """
    return named if 0 < len(named) <= _LONGEST_SHOWN else model


def model_header(model: str) -> dict[bytes, bytes]:
    """Return the header with the model's own name, percent-encoded: the answer has that of the request."""
    return {b"x-llmrun-model": quote(model, safe="/:@+").encode()}

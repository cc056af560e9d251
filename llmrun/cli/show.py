"""`llmrun show`: the metadata of a model, on this disk or on the hub."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmrun.cli.options import JsonOption, ModelArgument
from llmrun.config import Settings, load_settings
from llmrun.errors import NetworkError
from llmrun.gguf.adapter import adapter_facts, is_adapter
from llmrun.gguf.filenames import projector_for
from llmrun.gguf.header import Header
from llmrun.gguf.pooling import makes_embeddings, pooling_of
from llmrun.gguf.reader import read_header, read_modalities
from llmrun.models import hub
from llmrun.models.download.remote import read_remote_header
from llmrun.models.hub import login_hint, token
from llmrun.models.location import find_projector, locate
from llmrun.models.modelfile import Modelfile
from llmrun.models.registry import CatalogueEntry, EmbeddingAdvice, ModelSpec, load_catalogue
from llmrun.planning.estimate import choose_files
from llmrun.planning.memory import UBATCH
from llmrun.planning.predict import work_of
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.model_facts import show_model


def show(model: ModelArgument, json: JsonOption = False) -> None:
    """Show the metadata of a model, downloaded or not.

    For a model that is not on this disk, only the beginning of the file is downloaded.
    """
    output = Output(json=json)
    settings = load_settings()
    located = locate(model, settings)
    try:
        path, spec = located.path, located.spec
        facts = facts_here(path, spec) if path else _with_origin(_remote_facts(output, spec, settings), spec)
    except NetworkError:
        entry = load_catalogue().entries.get(located.spec.alias or "")
        if entry:
            _print(output, _catalogue_facts(entry))
        raise
    _print(output, facts)


def header_facts(header: Header) -> dict[str, Any]:
    """Return the header as plain data. Sizes in bytes, context windows in tokens."""
    if is_adapter(header):
        return _adapter_facts(header)
    return {
        "name": header.name,
        "architecture": header.architecture,
        "author": header.author,
        "base_model": header.base_model,
        "license": header.license,
        "parameters": header.n_parameters,
        "active_parameters": header.n_active_parameters,
        "active_bytes": int(sum(work_of(header).decode_bytes.values())),
        "quant": header.quant,
        "bits_per_weight": round(header.bits_per_weight, 2),
        "file_bytes": header.file_size,
        "files": header.split_count,
        "weight_bytes": header.weight_bytes,
        "bytes_per_type": header.bytes_per_type,
        "tensors_per_type": {share.type: share.n_tensors for share in header.type_shares},
        "layers": header.n_layers,
        **({"draft_heads": {"layers": heads, "bytes": header.head_bytes}} if (heads := header.n_draft_heads) else {}),
        **({"drafter": _drafter_facts(header)} if header.draft_kind else {}),
        "embedding_width": header.n_embd,
        "experts": header.n_experts,
        "experts_used": header.n_experts_used,
        "context_window": header.n_ctx_train,
        **_attention_facts(header),
        **_text_facts(header),
        **_embedding_facts(header),
        "recommended_sampling": header.recommended_sampling,
        "path": str(header.path),
    }


def _drafter_facts(header: Header) -> dict[str, Any]:
    """Return facts about a file that only drafts for another model."""
    return {
        "kind": header.draft_kind,
        "is_usable": header.draft_kind == "mtp" and header.can_use_heads,
        "target_width": header.integer(header.model_key("target_hidden_size")),
        "target_layers": header.target_layers,
    }


def facts_here(path: Path, spec: ModelSpec) -> dict[str, Any]:
    """Return facts about a model on this disk."""
    projector = _projector_facts(path, spec.modelfile.projector)
    facts = {**header_facts(read_header(path)), **projector, **_modelfile_facts(spec.modelfile)}
    return _with_origin(facts, spec)


def _modelfile_facts(modelfile: Modelfile) -> dict[str, Any]:
    """Return what Ollama's store has for a model besides its weights; empty if there is nothing."""
    facts = {
        "adapters": [str(path) for path in modelfile.adapters],
        "system": modelfile.system,
        "template": modelfile.template,
        "messages": [{"role": message.role, "content": message.content} for message in modelfile.messages],
        "sampling": dict(modelfile.sampling),
        "n_ctx": modelfile.n_ctx,
        "max_tokens": modelfile.max_tokens,
        "stop": list(modelfile.stop),
        "notes": list(modelfile.notes),
    }
    found = {name: value for name, value in facts.items() if value}
    return {"modelfile": found} if found else {}


def _projector_facts(model: Path, stored: Path | None) -> dict[str, Any]:
    """Return facts about the projector of a model; empty if there is none."""
    found = find_projector(model, stored=stored)
    if found is None:
        return {}
    read = sorted(read_modalities(found))
    return {"projector": {"name": found.name, "bytes": found.stat().st_size, "modalities": read}}


def _adapter_facts(header: Header) -> dict[str, Any]:
    """Return facts about a LoRA adapter. Raises as adapter_facts()."""
    found = adapter_facts(header)
    return {
        "name": header.name,
        "architecture": header.architecture,
        "author": header.author,
        "base_model": header.base_model,
        "license": header.license,
        "parameters": header.n_parameters,
        "adapter": {
            "type": "lora",
            "ranks": found.ranks,
            "alpha": found.alpha,
            "changes": len(found.pairs),
            "kinds": sorted({name.removesuffix(".weight").rpartition(".")[2] for name in found.pairs}),
        },
        "file_bytes": header.file_size,
        "weight_bytes": header.weight_bytes,
        "bytes_per_type": header.bytes_per_type,
        "tensors_per_type": {share.type: share.n_tensors for share in header.type_shares},
        "recommended_sampling": {},
        "path": str(header.path),
    }


def _attention_facts(header: Header) -> dict[str, Any]:
    return {
        "heads": header.n_heads,
        "kv_heads": header.n_kv_heads,
        "key_length": header.key_length,
        "value_length": header.value_length,
        "latent_attention": header.is_latent,
        "sliding_window": header.sliding_window,
        "window_layers": header.n_window_layers,
        "rope_base": header.rope_base,
        "rope_dimensions": header.rope_dimensions,
        "rope_scaling": header.rope_scaling,
        "rope_factor": header.rope_factor,
        "rope_original_context": header.rope_original_context,
        "kv_bytes_per_token": int(header.kv_bytes_per_token()),
        "kv_bytes": int(header.cache_bytes(header.n_ctx_train, ubatch=UBATCH)),
        "recurrent_bytes": header.recurrent_bytes,
    }


def _text_facts(header: Header) -> dict[str, Any]:
    tokens = {name: header.special_token(name) for name in ("bos", "eos", "eot", "unknown", "padding")}
    return {
        "vocabulary": header.n_vocab,
        "tokenizer": header.tokenizer_model,
        "tokenizer_pre": header.tokenizer_pre,
        "special_tokens": {name: text for name, text in tokens.items() if text is not None},
        "chat_template": header.chat_template is not None,
        "template_kind": header.template_kind,
    }


def _embedding_facts(header: Header) -> dict[str, Any]:
    """Return facts about an embedding model."""
    return {"pooling": pooling_of(header)} if makes_embeddings(header) else {}


def _prompt_facts(advice: EmbeddingAdvice | None) -> dict[str, Any]:
    return {} if advice is None else {"embedding_advice": asdict(advice)}


def _remote_facts(output: Output, spec: ModelSpec, settings: Settings) -> dict[str, Any]:
    """Return facts about a model that is not on this disk."""
    if spec.url is not None:
        return {**header_facts(read_remote_header(spec.url, on_note=output.note)), "path": None, "url": spec.url}
    assert spec.repository is not None, "neither path nor link"
    found = hub.repository_files(spec.repository, spec.revision, settings, output.note)
    parts = choose_files(spec, found, settings, output.note)
    url = hub.file_url(settings, found.id, found.commit, parts[0].name)
    seeing = projector_for(parts[0].name, (file.name for file in found.files))
    projector = next(({"name": file.name, "bytes": file.size} for file in found.files if file.name == seeing), None)
    return {
        **header_facts(
            read_remote_header(url, token=token(), login_hint=login_hint(settings, found.id), on_note=output.note)
        ),
        "file_bytes": hub.n_bytes(parts),
        **({"projector": projector} if projector else {}),
        "path": None,
        "url": url,
        "gated": found.gated,
        "quants": {quant: hub.n_bytes(files) for quant, files in hub.by_quant(found.files).items()},
    }


def _with_origin(facts: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return the facts with those of the built-in list added; the header wins."""
    entry = load_catalogue().entries.get(spec.alias or "")
    return {
        **facts,
        "name": spec.alias or facts["name"],
        "title": entry.title if entry is not None else facts["name"],
        "license": facts["license"] or spec.license,
        "recommended_sampling": {**spec.sampling, **facts["recommended_sampling"]},
        "alias": spec.alias,
        "repository": spec.repository,
        "agents": entry is None or entry.agents,
        **_prompt_facts(spec.embedding),
    }


def _catalogue_facts(entry: CatalogueEntry) -> dict[str, Any]:
    return {
        "name": entry.alias,
        "title": entry.title,
        "parameters": entry.parameters,
        "quant": entry.quant,
        "file_bytes": entry.n_bytes,
        "context_window": entry.context,
        "recommended_sampling": dict(entry.sampling),
        "license": entry.license,
        "path": None,
        "alias": entry.alias,
        "repository": entry.repository,
        "agents": entry.agents,
        "quants": [quant.upper() for quant in entry.quants],
        **_prompt_facts(entry.embedding),
    }


def _print(output: Output, facts: dict[str, Any]) -> None:
    if output.json:
        output.result_json(facts)
    else:
        show_model(output, facts)

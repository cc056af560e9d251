"""`llmrun show`: everything a model's header says, be it on this disk or still on the hub."""

from __future__ import annotations

from typing import Any

from llmrun.cli.options import JsonOption, ModelArgument
from llmrun.config import Settings, load_settings
from llmrun.errors import NetworkError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.models.locate import locate
from llmrun.models.registry import CatalogueEntry, ModelSpec, load_catalogue
from llmrun.ui.terminal.output import Output


def show(model: ModelArgument, json: JsonOption = False) -> None:
    """Show what a model's file says about itself, fetched or not.

    Of a model that is not on this disk, only the file's start is fetched.
    """
    output = Output(json=json)
    settings = load_settings()
    located = locate(model, settings)
    try:
        here = header_facts(read_header(located.path)) if located.path else None
        facts = here or _remote_facts(output, located.spec, settings)
    except NetworkError:
        entry = load_catalogue().entries.get(located.spec.alias or "")
        if entry:
            _print(output, _catalogue_facts(entry))
        raise
    _print(output, _with_origin(facts, located.spec))


def header_facts(header: Header) -> dict[str, Any]:
    """The header as plain data. Sizes in bytes, context windows in tokens."""
    return {
        "name": header.name,
        "architecture": header.architecture,
        "author": header.author,
        "base_model": header.base_model,
        "license": header.license,
        "parameters": header.n_parameters,
        "active_parameters": header.n_active_parameters,
        "quant": header.quant,
        "bits_per_weight": round(header.bits_per_weight, 2),
        "file_bytes": header.file_size,
        "files": header.split_count,
        "weight_bytes": header.weight_bytes,
        "bytes_per_type": header.bytes_per_type,
        "tensors_per_type": {share.type: share.n_tensors for share in header.type_shares},
        "layers": header.n_layers,
        "embedding_width": header.n_embd,
        "experts": header.n_experts,
        "experts_used": header.n_experts_used,
        "context_window": header.n_ctx_train,
        **_attention_facts(header),
        **_text_facts(header),
        "recommended_sampling": header.recommended_sampling,
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


def _remote_facts(output: Output, spec: ModelSpec, settings: Settings) -> dict[str, Any]:
    """The facts of a model that is not on this disk."""
    from llmrun.models import hub
    from llmrun.models.download.remote import read_remote_header
    from llmrun.models.question import login_hint, token

    if spec.url is not None:
        return {**header_facts(read_remote_header(spec.url, on_note=output.note)), "path": None, "url": spec.url}
    assert spec.repository is not None, "neither path nor link"
    from llmrun.planning.choice import choose

    found = hub.repository_files(spec.repository, spec.revision, settings, output.note)
    parts = choose(spec, found, settings, output.note)
    url = hub.file_url(settings, found.id, found.commit, parts[0].name)
    return {
        **header_facts(
            read_remote_header(url, token=token(), login_hint=login_hint(settings, found.id), on_note=output.note)
        ),
        "file_bytes": hub.n_bytes(parts),
        "path": None,
        "url": url,
        "gated": found.gated,
        "quants": {quant: hub.n_bytes(files) for quant, files in hub.by_quant(found.files).items()},
    }


def _with_origin(facts: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The facts, and what is known of a model besides its header; where both say something, the header counts."""
    return {
        **facts,
        "license": facts["license"] or spec.license,
        "recommended_sampling": {**spec.sampling, **facts["recommended_sampling"]},
        "alias": spec.alias,
        "repository": spec.repository,
    }


def _catalogue_facts(entry: CatalogueEntry) -> dict[str, Any]:
    return {
        "name": entry.title,
        "parameters": entry.parameters,
        "quant": entry.quant,
        "file_bytes": entry.size_mb * 1_000_000,
        "context_window": entry.context,
        "recommended_sampling": dict(entry.sampling),
        "license": entry.license,
        "path": None,
        "alias": entry.alias,
        "repository": entry.repository,
        "quants": [quant.upper() for quant in entry.quants],
    }


def _print(output: Output, facts: dict[str, Any]) -> None:
    from llmrun.ui.views.model_facts import show_model

    if output.json:
        output.result_json(facts)
    else:
        show_model(output, facts)

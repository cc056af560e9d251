"""`llmrun pull`, `list` and `show`: models on this disk and how they get here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from llmrun.cli.options import JsonOption, ModelArgument
from llmrun.config import Settings, load_settings
from llmrun.model import locate, not_on_disk
from llmrun.models.gguf import read_header
from llmrun.models.header import Header
from llmrun.models.registry import load_catalogue
from llmrun.models.store import Installed, Store
from llmrun.ui.output import Output


def pull(model: ModelArgument) -> None:
    """Download a model, or finish a download that was interrupted."""
    from llmrun.cli.loading import fetch

    output = Output()
    settings = load_settings()
    located = locate(model, settings)
    path = located.path or fetch(output, located.spec, settings, yes=True)
    output.note(f"{model} is at {path}")


def list_models(
    every: Annotated[bool, typer.Option("--all", help="Also the models that llmrun knows by name.")] = False,
    json: JsonOption = False,
) -> None:
    """List the models on this disk."""
    from llmrun.ui.tables import InstalledRow, show_installed

    output = Output(json=json)
    settings = load_settings()
    installed = Store(settings).installed()
    if every:
        _list_catalogue(output, settings)
    elif json:
        output.result_json([_plain(model) for model in installed])
    elif installed:
        show_installed(output, [InstalledRow(_short_name(m), m.size, m.quant, m.repository) for m in installed])
    else:
        output.note("No models on this disk yet. `llmrun list --all` shows what there is to choose from.")


def _list_catalogue(output: Output, settings: Settings) -> None:
    from llmrun.ui.tables import CatalogueRow, show_catalogue

    entries = load_catalogue().entries.values()
    rows = [
        CatalogueRow(
            entry.alias,
            entry.parameters,
            entry.quant,
            entry.size_mb * 1_000_000,
            entry.license,
            locate(entry.alias, settings).path is not None,
        )
        for entry in entries
    ]
    if output.json:
        output.result_json([asdict(row) for row in rows])
    else:
        show_catalogue(output, rows)


def _short_name(model: Installed) -> str:
    """The alias if the model has one, else the name that runs it."""
    for entry in load_catalogue().entries.values():
        if entry.repository == model.repository and entry.spec(entry.alias, entry.quant).filename == model.filename:
            return entry.alias
    return model.name


def _plain(model: Installed) -> dict[str, Any]:
    return {**asdict(model), "name": _short_name(model), "path": str(model.path)}


def show(model: ModelArgument, json: JsonOption = False) -> None:
    """Show what a model's file says about itself."""
    from llmrun.ui.tables import show_facts

    output = Output(json=json)
    located = locate(model, load_settings())
    if located.path is None:
        raise not_on_disk(model)
    facts = header_facts(read_header(located.path))
    facts["license"] = facts["license"] or located.spec.license
    if json:
        output.result_json(facts)
    else:
        known = [(name.replace("_", " "), value) for name, value in facts.items() if value not in (None, "", 0, {})]
        show_facts(output, known)


def header_facts(header: Header) -> dict[str, Any]:
    """The header as plain data. Sizes in bytes, context window in tokens."""
    return {
        "name": header.name,
        "architecture": header.architecture,
        "parameters": header.n_parameters,
        "quant": header.quant,
        "file_bytes": header.file_size,
        "weight_bytes": header.weight_bytes,
        "bytes_per_type": header.bytes_per_type,
        "layers": header.n_layers,
        "embedding_width": header.n_embd,
        "heads": header.n_heads,
        "kv_heads": header.n_kv_heads,
        "experts": header.n_experts,
        "context_window": header.n_ctx_train,
        "kv_bytes_per_token": int(header.kv_bytes_per_token()),
        "vocabulary": header.n_vocab,
        "tokenizer": header.tokenizer_model,
        "chat_template": header.chat_template is not None,
        "recommended_sampling": header.recommended_sampling,
        "license": header.license,
        "path": str(header.path),
    }

"""`llmrun pull`, `list` and `search`: models on this disk and on the hub."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.cli.options import JsonOption, ModelArgument
from llmrun.config import Settings, load_settings
from llmrun.errors import LlmrunError, NetworkError, UsageError, require_within
from llmrun.gguf.header import DRAFT_KINDS
from llmrun.models.registry import CatalogueEntry, ModelSpec, load_catalogue
from llmrun.models.store.installed import Installed
from llmrun.models.store.store import all_models
from llmrun.models.store.use import last_used
from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.planning.catalogue import ModelEstimate
    from llmrun.planning.hardware import Hardware

_MOST_MATCHES = 1000


def pull(
    model: ModelArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be downloaded; download nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Download a model, update it, or resume an interrupted download."""
    from llmrun.cli.loading import fetch, refresh
    from llmrun.gguf.reader import read_header
    from llmrun.models.location import locate

    output = Output(json=json)
    settings = load_settings()
    located = locate(model, settings)
    if located.spec.path is not None:
        read_header(located.spec.path)  # refuses a file that is no model
    if dry_run:
        _show_download_size(output, located.spec, settings)
        return
    if located.path is None:
        state, path = "downloaded", fetch(output, located.spec, settings, yes=True)
    else:
        state, path = refresh(output, located.spec, settings), located.path
        if state == "updated":
            path = locate(model, settings).path or path
    if json:
        output.result_json({"model": model, "state": state, "path": str(path)})
    else:
        told = {"unchanged": ", and the hub has no newer file", "updated": "; `llmrun gc` removes the older file"}
        output.note(f"{model} is at {path}{told.get(state, '')}")


def _show_download_size(output: Output, spec: ModelSpec, settings: Settings) -> None:
    """Print the download size of a model.

    Raises:
        UsageError: the model has no repository.
        LlmrunError: as the download would.
    """
    from llmrun.models import hub
    from llmrun.models.pull import find_offer
    from llmrun.planning.estimate import chooser

    if spec.repository is None:
        raise UsageError(f"{spec.name} has no repository, so its download is unknown")
    offer = find_offer(spec, settings, output.note, choose=chooser(settings, output.note))
    facts = {
        "model": spec.name,
        "repository": spec.repository,
        "commit": offer.commit,
        "quant": hub.quant_of(offer.parts),
        "files": [part.name for part in offer.parts],
        "n_bytes": hub.n_bytes(offer.parts),
        "missing_bytes": offer.missing,
    }
    if output.json:
        output.result_json(facts)
    else:
        size = readable_size(hub.n_bytes(offer.parts))
        missing = f"{readable_size(offer.missing)} to download" if offer.missing else "all of it is here"
        output.text(f"{offer.parts[0].name}, {size}: {missing}")


def list_models(
    every: Annotated[bool, typer.Option("--all", help="List the models that llmrun knows by name too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only names, one per line.")] = False,
    json: JsonOption = False,
) -> None:
    """List the models on this disk, including those of Ollama and LM Studio."""
    from llmrun.ui.terminal.sanitize import clean
    from llmrun.ui.terminal.tables import InstalledRow, show_installed

    output = Output(json=json)
    settings = load_settings()
    installed = all_models(settings)
    if every:
        _show_catalogue(output, list(load_catalogue().entries.values()), settings, quiet=quiet, others=installed)
        return
    if quiet and not json:
        for model in installed:
            output.text(clean(model.name))
        return
    stated = {model.path: _stated(model.path) for model in installed}
    installed = [replace(model, quant=model.quant or stated[model.path][0]) for model in installed]
    if json:
        output.result_json([as_plain(model) | {"draft_kind": stated[model.path][1]} for model in installed])
    elif installed:
        now = time.time()
        ages = {model: now - used for model in installed if (used := last_used(model.path))}
        rows = [InstalledRow(m.name, m.size, m.quant, ages.get(m), m.place) for m in installed]
        show_installed(output, rows)
        for model in installed:
            if kind := stated[model.path][1]:
                output.note(f"{model.name} is {DRAFT_KINDS[kind]}, not a model: llmrun show {model.name}")
    else:
        output.note("No models on this disk yet. `llmrun list --all` lists models to choose from.")


def _stated(path: Path) -> tuple[str, str]:
    """Return the quant in a model's header, and Header.draft_kind; "" for each if it can't be read."""
    from llmrun.gguf.reader import read_header

    try:
        header = read_header(path)
    except LlmrunError:
        return "", ""
    return header.quant, header.draft_kind


def search(
    words: Annotated[list[str], typer.Argument(metavar="WORDS", help="Words in the name of the repository.")],
    limit: Annotated[int, typer.Option("--limit", help="Maximum number of repositories to show.")] = 20,
    json: JsonOption = False,
) -> None:
    """Search for models by name, in the built-in list and on the hub."""
    from llmrun.models import hub
    from llmrun.ui.terminal.tables import MatchRow, show_matches

    require_within("--limit", limit, (1, _MOST_MATCHES))
    output = Output(json=json)
    settings = load_settings()
    words = " ".join(words).split()
    known = [entry for entry in load_catalogue().entries.values() if entry.matches(words)]
    if known and not json:
        _show_catalogue(output, known, settings)
    try:
        matches = hub.search(words, settings, limit, output.note)
    except NetworkError:
        if json:
            output.result_json({"catalogue": _plain_entries(known, settings), "hub": None})
        raise
    if json:
        plain = [asdict(match) for match in matches]
        output.result_json({"catalogue": _plain_entries(known, settings), "hub": plain})
    elif matches:
        if known:
            output.text("")
        show_matches(output, [MatchRow(m.repository, m.downloads, m.likes, m.updated, m.gated) for m in matches])
    else:
        output.note(f"The hub has no GGUF repository with {' '.join(words)!r} in its name.")


def as_plain(model: Installed) -> dict[str, Any]:
    """Return a model on this disk as JSON data. Times are ISO 8601, `used` None before the first use; sizes bytes."""
    times = {
        name: datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds") if seconds else None
        for name, seconds in (("modified", model.modified), ("used", last_used(model.path)))
    }
    return {**asdict(model), "path": str(model.path), **times}


def _show_catalogue(
    output: Output,
    entries: list[CatalogueEntry],
    settings: Settings,
    *,
    quiet: bool = False,
    others: Sequence[Installed] = (),
) -> None:
    """Print the built-in list of models, after models on this disk that it lacks."""
    from llmrun.ui.terminal.sanitize import clean
    from llmrun.ui.terminal.tables import AT_LEAST, CatalogueRow, show_catalogue

    aliases = [entry.alias for entry in entries]
    others = [model for model in others if model.name not in aliases]
    if quiet and not output.json:
        for name in (*(model.name for model in others), *aliases):
            output.text(clean(name))
        return
    plain = _plain_entries(entries, settings, others)
    if output.json:
        output.result_json(plain)
    else:
        show_catalogue(output, [CatalogueRow(**facts) for facts in plain])
        if any(facts["decode_rate"] and facts["is_lower_bound"] for facts in plain):
            output.note(f"{AT_LEAST}; llmrun plan measures again")
        if not any(facts["decode_rate"] for facts in plain):
            output.note("llmrun plan measures the speed of this machine, for predictions")


def _plain_entries(
    entries: list[CatalogueEntry], settings: Settings, others: Sequence[Installed] = ()
) -> list[dict[str, Any]]:
    """Return the built-in list as JSON data, after other models on this disk."""
    from llmrun.planning.catalogue import Estimates, FileSize, size_of_file
    from llmrun.planning.speed import remembered

    hardware = _hardware()
    estimates = Estimates(all_models(settings), hardware, remembered(hardware, settings.state_dir))
    rows: list[dict[str, Any]] = [
        {
            "alias": model.name,
            **(size_of_file(model.path) or FileSize("", model.quant, model.size))._asdict(),
            "licence": "",
            "agents": True,
            "installed": True,
            **_facts(estimates.of_file(model.path)),
        }
        for model in others
    ]
    rows += [
        {
            "alias": entry.alias,
            **estimates.size_of(entry)._asdict(),
            "licence": entry.license,
            "agents": entry.agents,
            "installed": estimates.file_of(entry) is not None,
            **_facts(estimates.of(entry)),
        }
        for entry in entries
    ]
    return rows


def _facts(estimate: ModelEstimate | None) -> dict[str, Any]:
    names = "memory_bytes", "fits", "fits_now", "decode_rate", "is_exact", "is_lower_bound"
    return asdict(estimate) if estimate else dict.fromkeys(names)


def _hardware() -> Hardware:
    """Return this machine, without its GPUs if llama.cpp can't be loaded."""
    from llmrun.planning.hardware import probe, this_machine

    try:
        return this_machine()
    except LlmrunError:
        return probe()

"""`llmrun search` and `pull`: models of the hub."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from llmrun.cli.loading import fetch
from llmrun.cli.models import plain_entries, show_entries
from llmrun.cli.options import JsonOption, ModelArgument
from llmrun.config import Settings, load_settings
from llmrun.errors import NetworkError, UsageError, require_within
from llmrun.gguf.reader import read_header
from llmrun.models import hub
from llmrun.models.location import locate
from llmrun.models.pull import Updated, find_offer, update
from llmrun.models.registry import ModelSpec, load_catalogue
from llmrun.planning.estimate import choose_files
from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.activity import download_progress
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.models import show_matches

_MOST_MATCHES = 1000


def search(
    words: Annotated[list[str], typer.Argument(metavar="WORDS", help="Words in the name of the repository.")],
    limit: Annotated[int, typer.Option("--limit", help="Maximum number of repositories to show.")] = 20,
    json: JsonOption = False,
) -> None:
    """Search for models by name, in the built-in list and on the hub."""
    require_within("--limit", limit, (1, _MOST_MATCHES))
    output = Output(json=json)
    settings = load_settings()
    words = " ".join(words).split()
    known = [entry for entry in load_catalogue().entries.values() if entry.matches(words)]
    if known and not json:
        show_entries(output, known, settings)
    try:
        matches = hub.search(words, settings, limit, output.note)
    except NetworkError:
        if json:
            output.result_json({"catalogue": plain_entries(known, settings), "hub": None})
        raise
    if json:
        plain = [asdict(match) for match in matches]
        output.result_json({"catalogue": plain_entries(known, settings), "hub": plain})
    elif matches:
        if known:
            output.text("")
        show_matches(output, matches)
    else:
        output.note(f"The hub has no GGUF repository with {' '.join(words)!r} in its name.")


def pull(
    model: ModelArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be downloaded; download nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Download a model, update it, or resume an interrupted download."""
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
        state, path = _refresh(output, located.spec, settings), located.path
        if state == "updated":
            path = locate(model, settings).path or path
    if json:
        output.result_json({"model": model, "state": state, "path": str(path)})
    else:
        told = {"unchanged": ", and the hub has no newer file", "updated": "; `llmrun gc` removes the older file"}
        output.note(f"{model} is at {path}{told.get(state, '')}")


def _refresh(output: Output, spec: ModelSpec, settings: Settings) -> Updated:
    """Download the newer file of a model on this disk, if there is one."""
    with download_progress(output, spec.name) as on_progress:
        return update(spec, settings, on_progress, on_progress.note)


def _show_download_size(output: Output, spec: ModelSpec, settings: Settings) -> None:
    """Print the download size of a model.

    Raises:
        UsageError: the model has no repository.
        LlmrunError: as the download would.
    """
    if spec.repository is None:
        raise UsageError(f"{spec.name} has no repository, so its download is unknown")
    offer = find_offer(spec, settings, output.note, choose=choose_files)
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

"""`llmrun list`, `import`, `verify`, `rm` and `gc`: models on this disk."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrun.cli.completion import complete_installed
from llmrun.cli.options import JsonOption, RemovalYesOption
from llmrun.config import Settings, load_settings
from llmrun.errors import (
    IntegrityError,
    LlmrunError,
    ModelNotFoundError,
    UsageError,
    did_you_mean,
)
from llmrun.gguf.header import DRAFT_KINDS
from llmrun.gguf.pooling import command_for
from llmrun.gguf.reader import read_header
from llmrun.models.fingerprint import VerificationResult
from llmrun.models.fingerprint import verify as verify_file
from llmrun.models.registry import CatalogueEntry, load_catalogue, resolve
from llmrun.models.store.installed import InstalledModel
from llmrun.models.store.other_programs import PROGRAMS, missing_folders
from llmrun.models.store.removal import Removal, collect, discard, plan_removal
from llmrun.models.store.removal import remove as remove_files
from llmrun.models.store.store import Store, all_models
from llmrun.models.store.use import holders, last_used, removing
from llmrun.planning.catalogue import local_estimates
from llmrun.protocol.sizes import readable_size
from llmrun.server.registry import running_servers
from llmrun.system import user_path
from llmrun.ui.terminal.activity import download_progress
from llmrun.ui.terminal.format import counted
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.views.models import ESTIMATED, show_catalogue, show_installed, show_leftovers, show_verified


def list_models(
    every: Annotated[bool, typer.Option("--all", help="List the models that llmrun knows by name too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only names, one per line.")] = False,
    json: JsonOption = False,
) -> None:
    """List the models on this disk, including those of Ollama, LM Studio and models.folders."""
    output = Output(json=json)
    settings = load_settings()
    installed = all_models(settings)
    for folder in missing_folders():
        output.note(f"{folder} of models.folders is not there.")
    if every:
        show_entries(output, list(load_catalogue().entries.values()), settings, quiet=quiet, others=installed)
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
        ages = {model.path: now - used for model in installed if (used := last_used(model.path))}
        show_installed(output, installed, ages)
        for model in installed:
            if kind := stated[model.path][1]:
                output.note(f"{model.name} is {DRAFT_KINDS[kind]}, not a model: llmrun show {model.name}")
    else:
        output.note("No models on this disk yet. `llmrun list --all` lists models to choose from.")


def _stated(path: Path) -> tuple[str, str]:
    """Return the quant in a model's header, and Header.draft_kind; "" for each if it can't be read."""
    try:
        header = read_header(path)
    except LlmrunError:
        return "", ""
    return header.quant, header.draft_kind


def as_plain(model: InstalledModel) -> dict[str, Any]:
    """Return a model on this disk as JSON data. Times are ISO 8601, `used` None before the first use; sizes bytes."""
    times = {
        name: datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds") if seconds else None
        for name, seconds in (("modified", model.modified), ("used", last_used(model.path)))
    }
    layers = [{"kind": layer.kind, "path": str(layer.path)} for layer in model.layers]
    return {**asdict(model), "path": str(model.path), "layers": layers, **times}


def show_entries(
    output: Output,
    entries: list[CatalogueEntry],
    settings: Settings,
    *,
    quiet: bool = False,
    others: Sequence[InstalledModel] = (),
) -> None:
    """Print the built-in list of models, after models on this disk that it lacks."""
    aliases = [entry.alias for entry in entries]
    others = [model for model in others if model.name not in aliases]
    if quiet and not output.json:
        for name in (*(model.name for model in others), *aliases):
            output.text(clean(name))
        return
    plain = plain_entries(entries, settings, others)
    if output.json:
        output.result_json(plain)
    else:
        show_catalogue(output, plain)
        if any(facts["decode_rate"] and facts["is_rate_estimated"] for facts in plain):
            output.note(ESTIMATED)
        if not any(facts["decode_rate"] for facts in plain):
            output.note("llmrun plan measures the speed of this machine, for predictions")


def plain_entries(
    entries: list[CatalogueEntry], settings: Settings, others: Sequence[InstalledModel] = ()
) -> list[dict[str, Any]]:
    """Return the built-in list as JSON data, after other models on this disk."""
    estimates = local_estimates(settings)
    return [
        *({"alias": model.name, **estimates.facts_of_file(model)} for model in others),
        *({"alias": entry.alias, **estimates.facts(entry)} for entry in entries),
    ]


NamesArgument = Annotated[
    list[str],
    typer.Argument(metavar="MODEL...", help="Names from `llmrun list`.", autocompletion=complete_installed),
]


def remove(models: NamesArgument, yes: RemovalYesOption = False, json: JsonOption = False) -> None:
    """Delete models from this disk."""
    output = Output(json=json)
    settings = load_settings()
    store = Store(settings)
    found = {model.path: model for model in (installed_model(name, settings) for name in models)}
    removals = [plan_removal(store, model) for model in found.values()]
    for removal in removals:
        try:
            with removing(removal.blobs, removal.model.name):
                pass  # better said before the question than after it
        except UsageError as error:
            raise _loaded_by(error, removal, settings) from None
        output.note(f"{removal.model.name}: {removal.model.path}, frees {readable_size(removal.freed)}")
        for other in removal.shared:
            output.note(f"  shared with {other}, so not all of its bytes")
    question = f"Remove {counted(len(removals), 'model')}?"
    if not _ask(output, question, yes=yes, command=shlex.join(["llmrun", "rm", "-y", *models])):
        return
    for removal in removals:
        remove_files(removal)
    if json:
        output.result_json(
            [{"name": r.model.name, "path": str(r.model.path), "freed_bytes": r.freed} for r in removals]
        )
    else:
        output.note(f"Freed {readable_size(sum(removal.freed for removal in removals))}.")


def collect_garbage(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    include_recent: Annotated[bool, typer.Option("--all", help="Include files younger than a day.")] = False,
    yes: RemovalYesOption = False,
    json: JsonOption = False,
) -> None:
    """Delete leftovers of interrupted downloads and updates.

    These are partial downloads, unreferenced blobs, old revisions and locks. Lists them and asks first.
    """
    output = Output(json=json)
    store = Store(load_settings())
    leftovers = collect(store, include_recent=include_recent)
    going = [leftover for leftover in leftovers if not leftover.keep]
    if json:
        plain = [{"path": str(one.path), "n_bytes": one.n_bytes, "why": one.why, "keep": one.keep} for one in leftovers]
    else:
        if leftovers:
            show_leftovers(output, leftovers, store.root)
        total = readable_size(sum(leftover.n_bytes for leftover in going))
        if going:
            output.note(f"{counted(len(going), 'file')} of no use in {store.root}, {total}.")
        else:
            output.note(f"Nothing to remove in {store.root}.")
    freed = 0
    question = f"Remove {counted(len(going), 'file')}?"
    if going and not dry_run and _ask(output, question, yes=yes, command="llmrun gc -y"):
        freed = discard(leftovers)
        output.note(f"Freed {readable_size(freed)}.")
    if json:
        output.result_json({"files": plain, "freed_bytes": freed})


def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="GGUF file; for a split model, its first part.")],
    name: Annotated[
        str, typer.Option("--name", metavar="[OWNER/]NAME", help="Name of the model. Default: local/FILE.")
    ] = "",
    move: Annotated[bool, typer.Option("--move", help="Move the file into the cache instead of copying it.")] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Link to the file instead of copying it; it must stay there.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Add a model file to the cache under a name.

    Every command then finds the model by this name.
    """
    from llmrun.models.store.importing import import_model  # slow: other commands do without

    if move and link:
        raise UsageError("--move and --link can't be used together", hint="give one of them, or none to copy")
    output = Output(json=json)
    settings = load_settings()
    spec = resolve(_as_path(str(file)))
    assert spec.path is not None, "a path stays one"
    with download_progress(output, str(file)) as on_progress:
        how: Any = "move" if move else "link" if link else "copy"
        model = import_model(spec.path, Store(settings), name=name, how=how, on_progress=on_progress)
    if json:
        output.result_json(as_plain(model))
    else:
        is_short = name and "/" not in name and name.lower() not in load_catalogue().entries
        short = name if is_short else model.name
        output.note(f"{short} is at {model.path}; try: {command_for(read_header(model.path), shlex.quote(short))}")


def verify(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help="Models to verify. Default: all.", autocompletion=complete_installed),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Verify the checksums of downloaded models."""
    output = Output(json=json)
    settings = load_settings()
    named = [installed_model(name, settings) for name in models] if models else all_models(settings)
    total, done = sum(model.size for model in named), 0
    results: list[VerificationResult] = []
    if named:
        with download_progress(output, "verify") as on_progress:

            def count(n_bytes: int) -> None:
                nonlocal done
                done += n_bytes
                on_progress(done, total)

            results = [verify_file(model, count) for model in named]
    if json:
        output.result_json([{**as_plain(r.model), "state": r.state, "text": r.text} for r in results])
    elif results:
        show_verified(output, results)
    else:
        output.note("No models on this disk yet.")
    _refuse_damaged([result.model for result in results if result.state == "damaged"])


def installed_model(name: str, settings: Settings) -> InstalledModel:
    """Return the model on this disk with a name of `llmrun list`, or with another name of the same file.

    Raises:
        ModelNotFoundError: the model is not on this disk; suggests similar names.
        UsageError: the file is not in the cache, or the name is ambiguous.
    """
    models = all_models(settings)
    for model in models:
        if model.name.lower() == name.lower():
            return model
    try:
        spec = resolve(name)
    except ModelNotFoundError as error:
        raise _not_here(name, models) from error
    if spec.repository and (spec.any_quant or not (spec.quant or spec.filename)):
        return _only_one(name, [m for m in models if m.repository.lower() == spec.repository.lower()], models)
    found = Store(settings).find(spec)
    if found:
        return next((model for model in models if model.path == found.path), found)
    if spec.path is None:
        raise _not_here(name, models)
    here = next((model for model in models if model.path.resolve() == spec.path.resolve()), None)
    if here:
        return here
    raise UsageError(f"{name} is a file of your own", why="this command is about models that `llmrun list` shows")


def _only_one(name: str, meant: list[InstalledModel], models: list[InstalledModel]) -> InstalledModel:
    """Return the only model of a repository; raise if there are several, so that no other quant is removed."""
    if not meant:
        raise _not_here(name, models)
    if len(meant) > 1:
        raise UsageError(
            f"{name} can be several models", why=", ".join(model.name for model in meant), hint="name one of these"
        )
    return meant[0]


def _not_here(name: str, models: list[InstalledModel]) -> ModelNotFoundError:
    hint = did_you_mean(name, [model.name for model in models], "`llmrun list` shows the models on this disk")
    return ModelNotFoundError(f"{name} is not on this disk", hint=hint)


def _loaded_by(error: UsageError, removal: Removal, settings: Settings) -> UsageError:
    """Describe the processes that have a model loaded, and how to end them."""
    servers = {server.pid: server for server in running_servers(settings.state_dir)}
    found = holders(removal.blobs)
    if not found:
        return error
    whys = (f"process {pid} has it loaded: {command:.200}" for pid, command in found.items())
    ends = (f"llmrun stop --port {servers[pid].port}" if pid in servers else f"kill {pid}" for pid in found)
    return UsageError(error.what, why="; ".join(whys), hint=" && ".join(ends))


def _ask(output: Output, question: str, *, yes: bool, command: str) -> bool:
    """Return whether the user agrees; print a note if not.

    Raises:
        UsageError: there is no terminal to ask on.
    """
    if yes:
        return True
    if not output.can_ask:
        raise UsageError("removal needs confirmation", why="there is no terminal to ask on", hint=command)
    if output.confirm(question):
        return True
    output.note("Nothing was removed.")
    return False


def _refuse_damaged(damaged: list[InstalledModel]) -> None:
    if not damaged:
        return
    names = ", ".join(model.name for model in damaged)
    ours = [shlex.quote(model.name) for model in damaged if model.is_ours]
    raise IntegrityError(
        f"{counted(len(damaged), 'model')} {'is' if len(damaged) == 1 else 'are'} damaged: {names}",
        why="the bytes are not those that were installed",
        hint=" && ".join(f"llmrun rm -y {name} && llmrun pull {name}" for name in ours)
        or "download it again with the program that owns it",
    )


def _as_path(text: str) -> str:
    """Return a file name that can't be mistaken for an alias or a repository."""
    is_name = text.partition("/")[0].lower() in PROGRAMS and not Path(text).exists()
    return text if is_name else str(user_path(text).absolute())

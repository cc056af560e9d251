"""`llmrun list`, `search`, `pull`, `import`, `verify`, `rm` and `gc`: models on this disk and on the hub."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.cli.completion import complete_installed
from llmrun.cli.options import JsonOption, ModelArgument, RemovalYesOption
from llmrun.config import Settings, load_settings
from llmrun.errors import (
    IntegrityError,
    LlmrunError,
    ModelNotFoundError,
    NetworkError,
    UsageError,
    did_you_mean,
    require_within,
)
from llmrun.gguf.header import DRAFT_KINDS
from llmrun.gguf.reader import read_header
from llmrun.models.location import locate
from llmrun.models.registry import CatalogueEntry, ModelSpec, load_catalogue, resolve
from llmrun.models.store.installed import Installed
from llmrun.models.store.store import Store, all_models
from llmrun.models.store.use import holders, last_used, removing
from llmrun.protocol.sizes import readable_size
from llmrun.system import user_path
from llmrun.ui.terminal.activity import download_progress
from llmrun.ui.terminal.format import counted
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import (
    AT_LEAST,
    CatalogueRow,
    FileRow,
    InstalledRow,
    MatchRow,
    show_catalogue,
    show_files,
    show_installed,
    show_matches,
)

if TYPE_CHECKING:
    from llmrun.models.store.removal import Removal
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


NamesArgument = Annotated[
    list[str],
    typer.Argument(metavar="MODEL...", help="Names from `llmrun list`.", autocompletion=complete_installed),
]


def remove(models: NamesArgument, yes: RemovalYesOption = False, json: JsonOption = False) -> None:
    """Delete models from this disk."""
    from llmrun.models.store.removal import plan_removal
    from llmrun.models.store.removal import remove as do_remove

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
        do_remove(removal)
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
    from llmrun.models.store.removal import collect, discard

    output = Output(json=json)
    store = Store(load_settings())
    leftovers = collect(store, include_recent=include_recent)
    going = [leftover for leftover in leftovers if not leftover.keep]
    if json:
        plain = [{"path": str(one.path), "n_bytes": one.n_bytes, "why": one.why, "keep": one.keep} for one in leftovers]
    else:
        rows = [
            FileRow(_inside(one.path, store.root), one.n_bytes, "keep" if one.keep else "remove", _reasons(one))
            for one in leftovers
        ]
        if rows:
            show_files(output, rows, ("PATH", "SIZE", "", "WHY"))
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
    from llmrun.gguf.pooling import command_for
    from llmrun.models.store.importing import import_model

    if move and link:
        raise UsageError("--move and --link can't be used together", hint="give one of them, or none to copy")
    output = Output(json=json)
    settings = load_settings()
    spec = resolve(_as_path(str(file)), load_catalogue())
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
    from llmrun.models.fingerprint import VerificationResult, verify

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

            results = [verify(model, count) for model in named]
    if json:
        output.result_json([{**as_plain(r.model), "state": r.state, "text": r.text} for r in results])
    elif results:
        rows = [FileRow(result.model.name, result.model.size, result.state, result.text) for result in results]
        show_files(output, rows, ("NAME", "SIZE", "STATE", "WHY"))
    else:
        output.note("No models on this disk yet.")
    _refuse_damaged([result.model for result in results if result.state == "damaged"])


def installed_model(name: str, settings: Settings) -> Installed:
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
        spec = resolve(name, load_catalogue())
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


def _only_one(name: str, meant: list[Installed], models: list[Installed]) -> Installed:
    """Return the only model of a repository; raise if there are several, so that no other quant is removed."""
    if not meant:
        raise _not_here(name, models)
    if len(meant) > 1:
        raise UsageError(
            f"{name} can be several models", why=", ".join(model.name for model in meant), hint="name one of these"
        )
    return meant[0]


def _not_here(name: str, models: list[Installed]) -> ModelNotFoundError:
    hint = did_you_mean(name, [model.name for model in models], "`llmrun list` shows the models on this disk")
    return ModelNotFoundError(f"{name} is not on this disk", hint=hint)


def _loaded_by(error: UsageError, removal: Removal, settings: Settings) -> UsageError:
    """Describe the processes that have a model loaded, and how to end them."""
    from llmrun.server.registry import running_servers

    servers = {server.pid: server for server in running_servers(settings.state_dir)}
    found = holders(removal.blobs)
    if not found:
        return error
    whys = (f"process {each.pid} has it loaded: {each.command:.200}" for each in found)
    ends = (
        f"llmrun stop --port {servers[each.pid].port}" if each.pid in servers else f"kill {each.pid}" for each in found
    )
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


def _refuse_damaged(damaged: list[Installed]) -> None:
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
    from llmrun.models.store.other_programs import PROGRAMS

    is_name = text.partition("/")[0].lower() in PROGRAMS and not Path(text).exists()
    return text if is_name else str(user_path(text).absolute())


def _reasons(leftover: Any) -> str:
    return f"{leftover.why}; {leftover.keep}" if leftover.keep else leftover.why


def _inside(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if root in path.parents else str(path)

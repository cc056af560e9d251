"""`llmrun rm`, `gc`, `import` and `verify`: models on this disk. Nothing is deleted without confirmation."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.cli.completion import complete_installed
from llmrun.cli.models import as_plain
from llmrun.cli.options import JsonOption, RemovalYesOption
from llmrun.config import Settings, load_settings
from llmrun.errors import IntegrityError, ModelNotFoundError, UsageError, did_you_mean
from llmrun.models.registry import load_catalogue, resolve
from llmrun.models.store.installed import Installed
from llmrun.models.store.store import Store, all_models
from llmrun.protocol.sizes import readable_size
from llmrun.system import user_path
from llmrun.ui.terminal.format import counted
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.models.store.removal import Removal

NamesArgument = Annotated[
    list[str],
    typer.Argument(metavar="MODEL...", help="Names from `llmrun list`.", autocompletion=complete_installed),
]


def remove(models: NamesArgument, yes: RemovalYesOption = False, json: JsonOption = False) -> None:
    """Delete models from this disk."""
    from llmrun.models.store.removal import plan_removal
    from llmrun.models.store.removal import remove as do_remove
    from llmrun.models.store.use import removing

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
    from llmrun.ui.terminal.tables import FileRow, show_files

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
    from llmrun.gguf.reader import read_header
    from llmrun.models.store.importing import import_model
    from llmrun.ui.terminal.progress import download_progress

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
    from llmrun.ui.terminal.progress import download_progress
    from llmrun.ui.terminal.tables import FileRow, show_files

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
    from llmrun.models.store.use import holders
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

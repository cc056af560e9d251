"""`llmrun config`: the settings file, the origin of each value, and presets made of Modelfiles."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrun.cli import settings_file
from llmrun.cli.command import Command, CommandGroup
from llmrun.cli.completion import complete_words
from llmrun.cli.defaults import ENVIRONMENT, SETTINGS_FILE, default_model
from llmrun.cli.options import JsonOption, OutputFileYesOption
from llmrun.cli.settings_file import FOLDERS
from llmrun.config import config_file, load_settings
from llmrun.errors import UsageError
from llmrun.models.location import locate
from llmrun.models.modelfile import Modelfile, as_modelfile, read_instructions
from llmrun.models.store.other_programs import missing_folders
from llmrun.protocol.params import PARAMETERS
from llmrun.storage import decode_text, write_whole
from llmrun.system import user_path
from llmrun.ui.prompt.editor import edit
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, show_table


def as_preset(found: Modelfile) -> tuple[dict[str, Any], list[str]]:
    """Return a Modelfile as a preset without its template, by the keys of settings_file.NAMED, and what is left out."""
    values: dict[str, Any] = {
        "model": found.model,
        "system": found.system,
        "lora": [str(adapter) for adapter in found.adapters],
        "mmproj": str(found.projector or ""),
        "ctx": found.n_ctx,
        "max-tokens": found.max_tokens,
        "stop": list(found.stop),
    }
    values = {key: value for key, value in values.items() if value}
    values |= {PARAMETERS[name].flag.lstrip("-"): value for name, value in found.sampling.items()}
    examples = (f"MESSAGE is left out: {message.role} {message.content:.40}" for message in found.messages)
    return values, [*found.notes, *examples]


_KEYS = ("model", "notes", FOLDERS, *(f"serve.{name}" for name in settings_file.SERVE), settings_file.SEARCH_KEY)

KeyArgument = Annotated[
    str,
    typer.Argument(
        metavar="KEY",
        help="model, notes, serve.OPTION, models.folders, tools.search, models.MODEL.OPTION or presets.NAME.OPTION; "
        "see llmrun help settings.",
        autocompletion=complete_words(*_KEYS),
    ),
]

app = typer.Typer(
    cls=CommandGroup, help="Show and change the settings: default model, presets, server.", add_completion=False
)


@app.callback(invoke_without_command=True)
def show(context: typer.Context, json: JsonOption = False) -> None:
    """Show and change the settings: default model, presets, server.

    Without a command, show each value and its origin.
    """
    if context.invoked_subcommand is not None:
        return
    output = Output(json=json)
    rows = _rows()
    if json:
        output.result_json([{"key": key, "value": value, "from": origin} for key, value, origin in rows])
        return
    columns = (Column("KEY", style="bold"), Column("VALUE"), Column("FROM", style="dim"))
    show_table(output, columns, [(key, settings_file.as_typed(value), origin) for key, value, origin in rows])
    path = config_file()
    output.note(f"Settings file: {path}" + ("" if path.exists() else ", which does not exist yet"))


@app.command("set", cls=Command)
def set_value(key: KeyArgument, value: Annotated[str, typer.Argument(metavar="VALUE", help="Its new value.")]) -> None:
    """Set a value.

    For example: llmrun config set models.smollm2.ctx 4096
    """
    output = Output()
    parsed = settings_file.parse(key, value, key)
    if key == "model" or (key.startswith(settings_file.PRESETS) and key.endswith(".model")):
        _require_model(value)
    if key == FOLDERS:
        parsed = [str(user_path(folder).absolute()) for folder in parsed]
        value = settings_file.as_typed(parsed)
    path = settings_file.change(key, parsed)
    for folder in missing_folders() if key == FOLDERS else ():
        output.note(f"warning: {folder} is not there")
    name = settings_file.variable(settings_file.split_key(key)[1])
    output.note(f"{key} is {value} in {path}")
    if os.environ.get(name, "").strip() and not key.startswith(settings_file.PRESETS):
        output.note(f"warning: {name} in the environment comes first")


def _require_model(name: str) -> None:
    """Raise if a name is not that of a model, here or in the catalogue; a repository of the hub may be there later.

    Raises:
        ModelNotFoundError: no model has this name.
    """
    locate(name, load_settings())


@app.command("import", cls=Command)
def import_modelfile(
    file: Annotated[Path, typer.Argument(metavar="MODELFILE", help="A Modelfile of Ollama.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the preset.")],
    yes: OutputFileYesOption = False,
) -> None:
    """Make a preset of an Ollama Modelfile.

    FROM, SYSTEM, PARAMETER, TEMPLATE and ADAPTER are used; what can't be is named. For example: llmrun config import
    Modelfile pirate, then llmrun chat --preset pirate
    """
    output = Output()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise UsageError(f"invalid name {name!r}", why="must be letters, digits and dashes")
    try:
        decoded = decode_text(file.read_bytes(), f"{str(file)!r} can't be read")
    except OSError as error:
        raise UsageError(f"{str(file)!r} can't be read", why=error.strerror or str(error)) from None
    if decoded.note:
        output.note(f"{file}: {decoded.note}")
    found = as_modelfile(read_instructions(decoded.text), file.absolute().parent)
    values, notes = as_preset(found)
    given = settings_file.read_file()
    if name in settings_file.preset_names(given):
        if not yes and not (output.can_ask and output.confirm(f"Replace the preset {name}?")):
            raise UsageError(f"there is already a preset {name}", hint=f"llmrun config import {file} {name} --yes")
        for key in settings_file.read_preset(name, given):
            settings_file.change(f"{settings_file.PRESETS}{name}.{key}", None)
    if found.template:
        template = config_file().parent / "presets" / f"{name}.jinja"
        write_whole(template, found.template, makes_folder=True)
        values = {**values, "template": str(template)}
    for key, value in values.items():
        settings_file.change(f"{settings_file.PRESETS}{name}.{key}", value)
    for note in notes:
        output.note(note)
    output.note(f"The preset {name} is in {config_file()}")
    output.note(f"llmrun chat --preset {name}", is_command=True)


@app.command("get", cls=Command)
def get_value(key: KeyArgument, json: JsonOption = False) -> None:
    """Print the value of a setting that applies: of the environment, the settings file, or the default."""
    settings_file.find_key(key, "")
    found = [value for name, value, _ in _rows() if name == key]
    found = found or [row[1] for row in [_row(key, settings_file.read_file())] if row is not None]
    if not found or found[0] is None:
        raise UsageError(f"{key} is not set", hint=f"llmrun config set {key} VALUE")
    output = Output(json=json)
    if json:
        output.result_json({"key": key, "value": found[0]})
    else:
        output.text(clean(settings_file.as_typed(found[0]), newlines=True))


@app.command("unset", cls=Command)
def unset_value(key: KeyArgument) -> None:
    """Remove a value."""
    if key not in settings_file.read_file():
        settings_file.find_key(key, "")
        raise UsageError(f"{key} is not set", why=f"not in {config_file()}", hint="llmrun config")
    Output().note(f"{key} is removed from {settings_file.change(key, None)}")


@app.command("edit", cls=Command)
def edit_file() -> None:
    """Edit the settings file with VISUAL or EDITOR. An invalid text is refused."""
    output, path = Output(), config_file()
    before = path.read_text(encoding="utf-8").removesuffix("\n") if path.exists() else ""
    text = edit(before, name=path.name)
    while (error := _mistake(text, path)) is not None:
        if not output.can_ask:
            raise error
        output.error(error)
        if not output.confirm("Edit it again?", enter=True):
            return
        text = edit(text, name=path.name)
    if text != before:
        write_whole(path, f"{text}\n" if text else "", makes_folder=True)
        output.note(f"{path} is changed")


def _mistake(text: str, path: Path) -> UsageError | None:
    try:
        settings_file.read_text(text, path)
    except UsageError as error:
        return error
    return None


def _rows() -> list[tuple[str, str | int | float | None, str]]:
    """Return (key, value, origin) of the default model, the server's options, presets, and variables for all models.

    Raises:
        UsageError: the settings file or a variable is invalid.
    """
    from llmrun.cli.serve import serve

    given = settings_file.read_file()
    model, origin = default_model(given)
    rows: list[tuple[str, str | int | float | None, str]] = [("model", model or None, origin or "not set")]
    rows.append(_row("notes", given) or ("notes", False, "default"))
    defaults = inspect.signature(serve).parameters
    for name, option in settings_file.SERVE.items():
        row = _row(f"serve.{name}", given)
        rows.append(row or (f"serve.{name}", defaults[option.parameter].default, "default"))
    search = _row(settings_file.SEARCH_KEY, given)
    rows += [] if search is None else [search]
    presets = [row for key in {FOLDERS: "", **given} if key.startswith("models.") and (row := _row(key, given))]
    presets += [(key, value, SETTINGS_FILE) for key, value in given.items() if key.startswith(settings_file.PRESETS)]
    every = [row for name in settings_file.PRESET if (row := _row(f"models..{name}", {}))]
    return [*rows, *presets, *((settings_file.split_key(key)[1], value, origin) for key, value, origin in every)]


def _row(key: str, given: dict[str, str | int | float]) -> tuple[str, str | int | float, str] | None:
    """Return the key with its value and origin; None if only the built-in default applies."""
    if (found := settings_file.look_up(key, given)) is None:
        return None
    value, variable = found
    return key, value, f"{ENVIRONMENT}: {variable}" if variable else SETTINGS_FILE

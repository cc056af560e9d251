"""The model and the options that the command line leaves out: from the environment, the settings file, or the last use.

Order: flag > --preset > environment > the model's preset > tuned > model > default. The last three are known only when
the model is loaded.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llmrun.cli import settings_file
from llmrun.cli.options import PRESET_ORIGINS
from llmrun.config import LAST_MODEL_FILE, load_settings, model_aliases
from llmrun.errors import LlmrunError, ModelNotFoundError, NoModelError, UsageError, near_names
from llmrun.models.registry import load_catalogue, modelfile_of, resolve
from llmrun.models.store.installed import OLLAMA
from llmrun.planning.hardware import probe
from llmrun.protocol.exclusions import yielding
from llmrun.protocol.layers import Layer, layer, origins_of, resolved, values_of
from llmrun.protocol.sizes import readable_size
from llmrun.storage import write_whole
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, show_table

if TYPE_CHECKING:
    from llmrun.models.modelfile import Modelfile
    from llmrun.planning.catalogue import Proposal
    from llmrun.planning.preferences import LoadPreferences

_HAVE_DEFAULT_MODEL = frozenset({"run", "chat"})
ENVIRONMENT, PRESET, SETTINGS_FILE, LAST_USED = "environment", "preset", "settings file", "last used"
_OF_ENGINES = frozenset({*(key.parameter for key in settings_file.LOADING.values()), "lora", "mmproj"})
_MODEL_VARIABLE = "LLMRUN_MODEL"
_MODEL_LIKE = re.compile(r"[a-z][a-z._-]*\d[\w.-]*|.*:.+", re.IGNORECASE)  # qwen9, phi-5, name:quant


def default_model(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the model to use if none is named, and its origin; ("", "") if there is none.

    Args:
        values: of the settings file.
    """
    if name := os.environ.get(_MODEL_VARIABLE, "").strip():
        return name, ENVIRONMENT
    if name := values.get("model", ""):
        return name, SETTINGS_FILE
    with suppress(OSError, UnicodeDecodeError):
        name = (load_settings().state_dir / LAST_MODEL_FILE).read_text(encoding="utf-8").strip()
    return name, LAST_USED if name else ""


def remember_model(name: str) -> None:
    """Keep the name of a model for default_model(), if the disk allows it."""
    path = load_settings().state_dir / LAST_MODEL_FILE
    with suppress(OSError, UnicodeDecodeError, LlmrunError):
        if not path.is_file() or path.read_text(encoding="utf-8") != name:
            write_whole(path, name, makes_folder=True)


def choose_model(output: Output, error: NoModelError) -> str:
    """Return the model that the user chooses of the proposed ones, by one key.

    Raises:
        NoModelError: there is no terminal to ask on.
        UsageError: none is chosen.
    """
    if not output.can_ask:
        raise error
    output.note("No model has been used yet. Three for this machine, downloaded on first use:", dim=False)
    keys = {str(number): each for number, each in enumerate(error.proposals, 1)}
    columns = Column("", style="cyan"), Column("", style="bold"), Column("", right=True), Column("", style="dim")
    show_table(output, columns, [(key, *each) for key, each in keys.items()], stderr=True)
    key = output.press(f"Which one? [{'/'.join(keys)}, or Enter for none]", keys)
    if not key:
        raise UsageError("no model is chosen", hint="llmrun list --all shows more of them")
    return keys[key][0]


def no_model(command: str, words: Sequence[str] = ()) -> NoModelError:
    """Return the error for a missing model; proposes a small, a middle and a large one that fit into memory."""
    from llmrun.planning.catalogue import local_estimates, propose

    chosen = propose(load_catalogue().entries.values(), local_estimates(load_settings(), probe()))
    proposals = [(each.entry.alias, readable_size(each.size.n_bytes), _about(each)) for each in chosen]
    sizes = ", ".join(f"{name} ({size})" for name, size, _ in proposals)
    why = f"none is in the settings, and none has been used yet; fit into this machine's memory: {sizes}"
    first, *options = command.split()
    hint = shlex.join(["llmrun", first, proposals[0][0], *options, *words])
    return NoModelError(why=why, hint=hint, proposals=proposals)


def _about(proposal: Proposal) -> str:
    """Return what a proposed model is for, and whether it would have to wait for memory."""
    estimate = proposal.estimate
    is_short = estimate.fits and not estimate.fits_now
    return f"{proposal.purpose}; too little memory is free now" if is_short else proposal.purpose


def with_preset(model: str, preferences: LoadPreferences) -> LoadPreferences:
    """Return preferences, completed by the load settings of the environment or a model's preset, as fill() does.

    For commands that measure what `chat` and `serve` do. Raises UsageError as fill().
    """
    return preferences.completed(preset_layer(settings_file.read_file(), model_aliases().get(model, model)))


def fill(command: str, context: Any, values: dict[str, Any], typed: Mapping[str, Any]) -> None:
    """Put the default model into the parsed values of a command, and presets into the context's defaults.

    Aliases of the settings file become the models' names.

    Args:
        context: Typer's.
        values: by parameter, None if missing; changed.
        typed: the values by flag, see Command.typed().

    Raises:
        UsageError: the settings file or a variable is invalid.
    """
    given, aliases = settings_file.read_file(), model_aliases()
    if command == "serve":  # which applies presets to requests and loads, see cli.serve
        values["models"] = tuple(aliases.get(name, name) for name in values.get("models") or ())
        if values.get("parent") is None:  # `llmrun launch` chooses its server's options
            options = {key: settings_file.look_up(f"serve.{name}", given) for name, key in settings_file.SERVE.items()}
            context.default_map = {key.parameter: found[0] for key, found in options.items() if found is not None}
        return
    named = settings_file.read_preset(values["preset"], given) if values.get("preset") else {}
    is_remote = not typed.keys().isdisjoint(("--at", "LLMRUN_SERVER"))
    model = _model(command, values, given, named.pop("model", ""), is_remote=is_remote)
    if model in aliases and not is_remote:  # a server's own names come first, see cli.remote.served_model()
        values["model"] = aliases[model]
    model = aliases.get(model, model)
    by_parameter = {settings_file.NAMED[key].parameter: value for key, value in named.items()}
    stored = {} if is_remote else stored_layer(modelfile_of(model))
    found = resolved(layer(f"{PRESET} {values.get('preset')}", by_parameter), preset_layer(given, model), stored)
    if is_remote:
        found = {name: each for name, each in found.items() if name not in _OF_ENGINES}
    found = yielding(found, typed)
    context.default_map = values_of(found)
    context.meta[PRESET_ORIGINS] = origins_of({name: found[name] for name in found if values.get(name) is None})


def _model(command: str, values: dict[str, Any], given: Mapping[str, Any], of_preset: str, *, is_remote: bool) -> str:
    """Return the name of the model, and put the default one into a command without one.

    Args:
        of_preset: the model of --preset; the only argument of `run` is then the prompt.
    """
    if command not in _HAVE_DEFAULT_MODEL:
        return values.get("model") or ""
    if command == "run":
        named = values.get("model")
        default, origin = (of_preset, PRESET) if of_preset else default_model(given)
        is_guess = not is_remote and not of_preset and _may_be_prompt(named, values, given, has_default=bool(default))
        is_prompt = named is not None and (_is_prompt(named) or is_guess or (of_preset and not values.get("prompt")))
        if named is not None and not is_prompt:
            return str(named)
        if named is not None:
            values["prompt"] = (named, *(values.get("prompt") or ()))
        if is_guess and default:
            Output().note(f"{default} ({origin}) answers: {named!r} is not a model, so it is the prompt")
        values["model"] = "default" if is_remote else default
    elif values.get("model") is None and not is_remote:
        if values.get("last") or values.get("session"):
            continued = _continued(values.get("session") or "")
            values["model"] = None if continued else default_model(given)[0]
            return continued or values["model"]
        values["model"] = of_preset or default_model(given)[0]
    return values.get("model") or ""


def _is_prompt(word: str) -> bool:
    """Return whether a word in the place of the model is a prompt: several words, and not the name of a file."""
    is_path = word.startswith(("/", "./", "../", "~")) or word.lower().endswith(".gguf") or os.path.isfile(word)  # noqa: PTH113
    return len(word.split()) > 1 and not is_path


def _may_be_prompt(word: str | None, values: Mapping[str, Any], given: Mapping[str, Any], *, has_default: bool) -> bool:
    """Return whether the only word of a command, which is no model's name, is the prompt.

    It is one beside a text from stdin or a file, or where a default model can answer it. What looks like a model's name
    is a mistyped one.

    Args:
        values: parsed values by parameter.
        given: values of the settings file.
        has_default: there is a default model.
    """
    if word is None or values.get("prompt") or _is_prompt(word) or any(k.startswith(f"models.{word}.") for k in given):
        return False
    has_text = not Output().stdin_is_terminal or any(values.get(name) for name in ("files", "images", "audio", "docs"))
    if not (has_text or has_default):
        return False
    try:
        resolve(word)
    except ModelNotFoundError:
        is_path = word.startswith((".", "/", "~")) or word.lower().endswith(".gguf")
        names = [*load_catalogue().entries, *model_aliases()]
        return not (is_path or _MODEL_LIKE.fullmatch(word) or near_names(word, names))
    except LlmrunError:
        pass  # an invalid name; the error says why
    return False


def _continued(session: str) -> str:
    """Return the name of the model that answered last in a saved chat; "" if there is no such chat or answer."""
    from llmrun.chat.store.store import Sessions, folder_in

    try:
        with Sessions(folder_in(load_settings().state_dir), on_damage=lambda _: None) as sessions:
            return (sessions.find(session) if session else sessions.last_free()[0]).model
    except LlmrunError:
        return ""


def preset_layer(given: Mapping[str, Any], model: str) -> Layer:
    """Return the values of the environment and of a model's preset, by parameter."""
    found = {}
    for name, key in settings_file.PRESET.items():
        keys = (f"models.{each}.{name}" for each in (model, model.partition(":")[0]) if each)
        value = settings_file.look_up(next((each for each in keys if each in given), f"models..{name}"), given)
        if value is not None:
            found[key.parameter] = (value[0], ENVIRONMENT if value[1] else PRESET)
    return found


def stored_layer(modelfile: Modelfile) -> Layer:
    """Return the values of a preset that Ollama's store has for a model, besides what Model takes from there."""
    names = "system", "template", "max_tokens", "stop"
    return layer(OLLAMA, {name: value for name in names if (value := getattr(modelfile, name))})

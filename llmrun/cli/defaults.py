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
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmrun.cli import sampling, settings_file
from llmrun.cli.settings_file import LOADING
from llmrun.config import LAST_MODEL_FILE, load_settings, model_aliases
from llmrun.errors import LlmrunError, ModelNotFoundError, NoModelError, UsageError, near_names
from llmrun.models.registry import load_catalogue, modelfile_of, resolve
from llmrun.models.store.installed import OLLAMA
from llmrun.planning.hardware import probe
from llmrun.protocol.params import PARAMETERS
from llmrun.protocol.sizes import readable_size
from llmrun.storage import write_whole
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, show_table

if TYPE_CHECKING:
    from llmrun.models.modelfile import Modelfile
    from llmrun.planning.preferences import LoadPreferences

_HAVE_DEFAULT_MODEL = frozenset({"run", "chat"})
ENVIRONMENT, PRESET, SETTINGS_FILE, LAST_USED = "environment", "preset", "settings file", "last used"
_WITHOUT_TOOLS = ("raw", "beams", "record", "answers", "logprobs")
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
    from llmrun.models.store.store import all_models
    from llmrun.planning.catalogue import Estimates, propose
    from llmrun.planning.speed import remembered

    settings, hardware = load_settings(), probe()
    estimates = Estimates(all_models(settings), hardware, remembered(hardware, settings.state_dir))
    chosen = propose(load_catalogue().entries.values(), estimates)
    proposals = [(each.entry.alias, readable_size(each.size.n_bytes), each.purpose) for each in chosen]
    sizes = ", ".join(f"{name} ({size})" for name, size, _ in proposals)
    why = f"none is in the settings, and none has been used yet; fit into this machine's memory: {sizes}"
    first, *options = command.split()
    hint = " or ".join(shlex.join(["llmrun", first, name, *options, *words]) for name, *_ in proposals)
    return NoModelError(why=why, hint=hint, proposals=proposals)


def with_preset(model: str, preferences: LoadPreferences) -> LoadPreferences:
    """Return preferences with context and cache types of the environment or a model's preset, as fill() does.

    For commands that measure what `chat` and `serve` do. Raises UsageError as fill().
    """

    found = preset_values(settings_file.read_file(), model_aliases().get(model, model), is_remote=False)
    return replace(preferences, **loading_fields(found))


def loading_fields(found: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """Return the fields of LoadPreferences in a preset."""

    values = {LOADING[key].parameter: value for key, (value, _) in found.items() if key in LOADING}
    return {"n_ctx" if name == "ctx" else name: value for name, value in values.items()}


def fill(command: str, context: Any, values: dict[str, Any]) -> None:
    """Put the default model into the parsed values of a command, and presets into the context's defaults.

    Aliases of the settings file become the models' names.

    Args:
        context: Typer's.
        values: by parameter, None if missing; changed.

    Raises:
        UsageError: the settings file or a variable is invalid.
    """
    if values.get("help") or values.get("help_all"):
        return
    given, aliases = settings_file.read_file(), model_aliases()
    if command == "serve":  # which applies presets to requests and loads, see cli.serve
        values["models"] = tuple(aliases.get(name, name) for name in values.get("models") or ())
        if values.get("parent") is None:  # `llmrun launch` chooses its server's options
            options = {key: settings_file.look_up(f"serve.{name}", given) for name, key in settings_file.SERVE.items()}
            context.default_map = {key.parameter: found[0] for key, found in options.items() if found is not None}
        return
    named = settings_file.read_preset(values["preset"], given) if values.get("preset") else {}
    is_remote = bool((values.get("at") or os.environ.get("LLMRUN_SERVER", "")).strip())
    model = _model(command, values, given, named.pop("model", ""), is_remote=is_remote)
    if model in aliases and not is_remote:  # a server's own names come first, see cli.remote.served_model()
        values["model"] = aliases[model]
    model = aliases.get(model, model)
    found = preset_values(given, model, is_remote=is_remote)
    if not is_remote:
        found = {**stored_values(modelfile_of(model)), **found}
    origin = f"preset {values.get('preset')}"
    found |= {
        name: (value, origin)
        for name, value in named.items()
        if not (is_remote and name in (*settings_file.LOADING, "lora", "mmproj"))
    }
    found = _yielding(found, values)
    parameters = {name: settings_file.NAMED[name].parameter for name in found}
    context.default_map = {parameters[name]: value for name, (value, _) in found.items()}
    sampling.PRESET_ORIGINS.clear()
    sampling.PRESET_ORIGINS |= {
        parameters[name]: origin for name, (_, origin) in found.items() if values.get(parameters[name]) is None
    }


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
            return sessions.find(session).model
    except LlmrunError:
        return ""


def preset_values(given: Mapping[str, Any], model: str, *, is_remote: bool) -> dict[str, tuple[Any, str]]:
    """Return the values of a model's preset and of the environment, with their origins."""

    found = {}
    for name in settings_file.PRESET:
        if is_remote and name in settings_file.LOADING:
            continue
        keys = (f"models.{each}.{name}" for each in (model, model.partition(":")[0]) if each)
        value = settings_file.look_up(next((key for key in keys if key in given), f"models..{name}"), given)
        if value is not None:
            found[name] = (value[0], ENVIRONMENT if value[1] else PRESET)
    return found


def stored_values(modelfile: Modelfile) -> dict[str, tuple[Any, str]]:
    """Return the values of a preset that Ollama's store has for a model, besides what Model takes from there."""
    values = {
        "system": modelfile.system,
        "template": modelfile.template,
        "max-tokens": modelfile.max_tokens,
        "stop": list(modelfile.stop),
    }
    return {name: (value, OLLAMA) for name, value in values.items() if value}


def _yielding(found: dict[str, tuple[Any, str]], typed: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the values of presets and the environment that exclude no option of the command line.

    Args:
        typed: parsed values by parameter, None if missing.
    """

    def excludes(name: str, value: Any) -> bool:
        key = settings_file.NAMED[name]
        beams = typed.get("beams") is not None
        thinks, limits = typed.get("thinking"), (typed.get("reasoning_effort"), typed.get("thinking_tokens"))
        return (
            (name == "tools" and any(typed.get(each) for each in _WITHOUT_TOOLS))
            or (beams and (name.startswith("think-") or (name == "think" and value)))
            or (name == "think" and limits != (None, None))
            or (name.startswith("think-") and thinks is False)
            or (name == "think-effort" and value == "none" and bool(thinks))
            or (beams and key.is_sampling and not PARAMETERS[key.parameter].for_beams)
            or (bool(typed.get("watermark")) and key.parameter == "mirostat")
            or (typed.get("flash_attention") == "off" and key.parameter == "kv_type_v")
        )

    return {name: each for name, each in found.items() if not excludes(name, each[0])}

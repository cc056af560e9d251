"""The user's settings file: its keys, reading, and changing one value.

    model = "smollm2"            the default model
    notes = true                 notes across chats
    [serve]                      options of `llmrun serve`
    port = 8081
    [models]
    folders = ["/data/gguf"]     more models, which stay where they are
    [tools]                      ready-made tools
    search = "https://..."       a SearXNG server
    [models.smollm2]             the preset of a model
    ctx = 4096
    [presets.pirate]             `llmrun chat --preset pirate`
    model = "smollm2"
    system = "Talk like a pirate."

Here a key is the path to a value, e.g. "models.smollm2.ctx".
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llmrun.cli.sampling import read_value
from llmrun.config import config_file, read_toml, texts_of
from llmrun.errors import ResourceError, UsageError, did_you_mean, require_within
from llmrun.protocol.exclusions import conflict, spelled
from llmrun.protocol.messages import REQUEST_FIELDS
from llmrun.protocol.params import PARAMETERS
from llmrun.protocol.settings import PARALLEL_BOUNDS, SETTINGS
from llmrun.server.protocols.fields import read_time
from llmrun.storage import write_whole

_HIGHEST = 2**31 - 1
_SWITCH = {"true": True, "on": True, "false": False, "off": False}


class Key(NamedTuple):
    """A setting: an option of a command by its name without dashes."""

    parameter: str  # of the command
    kind: type[int] | type[float] | type[str] | type[bool]
    choices: tuple[str, ...] = ()
    is_sampling: bool = False
    bounds: tuple[int, int] = (0, _HIGHEST)
    is_time: bool = False
    is_list: bool = False  # of texts


def _request_keys(kind: str) -> dict[str, Key]:
    """Return the keys of fields of a request, named as their options, in presets of a kind."""
    types: dict[str, type[int] | type[str] | type[bool]] = {"bool": bool, "int": int, "str": str}
    return {
        row.flag.partition("/")[0].lstrip("-"): Key(
            name, types[row.plain_type], row.choices, bounds=row.bounds or (0, _HIGHEST)
        )
        for name, row in REQUEST_FIELDS.items()
        if row.preset == kind
    }


LOADING = {"ctx": Key("n_ctx", int)} | {
    row.option.lstrip("-"): Key(name, int if row.bounds else str, row.choices, bounds=row.bounds or (0, _HIGHEST))
    for name, row in SETTINGS.items()
    if row.in_preset
}
"""Keys of a preset that mean nothing for a remote server."""
PRESET = {
    "system": Key("system", str),
    "max-tokens": Key("max_tokens", int, bounds=(1, _HIGHEST)),
    **_request_keys("model"),
    **LOADING,
} | {row.flag.lstrip("-"): Key(name, str, (), True) for name, row in PARAMETERS.items() if row.in_preset}
NAMED = {
    "model": Key("model", str),
    **PRESET,
    **_request_keys("named"),
    "tools": Key("tools", str, is_list=True),
    "docs": Key("docs", str),
    "stop": Key("stop", str, is_list=True),
    "lora": Key("lora", str, is_list=True),
    "mmproj": Key("mmproj", str),
}
"""Keys of a preset with a name of its own, for --preset."""
SERVE = {
    "host": Key("host", str),
    "port": Key("port", int, bounds=(0, 65_535)),
    "parallel": Key("parallel", int, bounds=PARALLEL_BOUNDS),
    "queue": Key("queue", int, bounds=(0, 10_000)),
    "keep": Key("keep", str, is_time=True),
    "timeout": Key("timeout", str, is_time=True),
    "grace": Key("grace", str, is_time=True),
}
PRESETS = "presets."
_MODEL, _ALIAS, _SEARCH = Key("model", str), Key("alias", str), Key("search", str)
_FOLDERS, _NOTES = Key("folders", str, is_list=True), Key("notes", bool)
FOLDERS, SEARCH_KEY = "models.folders", "tools.search"


def variable(name: str) -> str:
    """Return the environment variable of a key's last part, e.g. LLMRUN_CACHE_TYPE_K."""
    return f"LLMRUN_{name.upper().replace('-', '_')}"


def look_up(key: str, given: Mapping[str, Any]) -> tuple[Any, str] | None:
    """Return the value of a key, and the variable that it is from, "" if from the settings file; None without one.

    Args:
        given: values of the settings file.

    Raises:
        UsageError: the variable is invalid.
    """
    name = variable(split_key(key)[1])
    if text := os.environ.get(name, "").strip():
        return parse(key, text, name), name
    return (given[key], "") if key in given else None


def find_key(key: str, where: str) -> Key:
    """Return the setting of a key.

    Raises:
        UsageError: there is none.
    """
    table, name = split_key(key)
    tables = {
        "": {"model": _MODEL, "notes": _NOTES},
        "serve": SERVE,
        "models": {"folders": _FOLDERS},
        "tools": {"search": _SEARCH},
    }
    known = tables.get(table, {})
    if table.startswith("models."):
        known = {**PRESET, "alias": _ALIAS}
    if table.startswith(PRESETS):
        known = NAMED
    if name in known:
        return known[name]
    head = f"{table}." if known and table else ""
    names = [f"{head}{each}" for each in known if table not in ("", "models")] or [
        "model",
        "notes",
        *(f"serve.{each}" for each in SERVE),
        FOLDERS,
        SEARCH_KEY,
        "models.MODEL.ctx",
        "presets.NAME.system",
    ]
    hint = did_you_mean(f"{head}{name}", names) or f"one of {', '.join(names)}"
    raise UsageError(f"there is no setting {key!r}", why=where, hint=hint)


def split_key(key: str) -> tuple[str, str]:
    """Return the table of a key, and its name there."""
    table, _, name = key.rpartition(".")
    return table, name


def parse(key: str, text: str, label: str) -> Any:
    """Return a value of a setting from text.

    Raises:
        UsageError: there is no such setting, or the value is invalid; `label` names it.
    """
    found = find_key(key, "")
    if found.is_sampling:
        try:
            value = read_value(split_key(key)[1], text)[1]
        except UsageError as error:
            raise UsageError(f"invalid {label} {text}", why=error.why, hint=error.hint) from None
        return ",".join(value) if isinstance(value, tuple) else value
    if found.is_list:
        return _texts(text, label)
    if found.choices and text not in found.choices:
        raise UsageError(f"invalid {label} {text}", why=f"must be {', '.join(found.choices)}")
    if found is _ALIAS and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise UsageError(f"invalid {label} {text}", why="must be a name of letters, digits, dots and dashes")
    if found is _SEARCH and not re.match(r"https?://[^/\s]", text):
        raise UsageError(f"invalid {label} {text}", why="must be the https:// or http:// address of a SearXNG server")
    if found.is_time:
        read_time(label, text)
    if found.kind is str:
        return text
    if found.kind is bool:
        if text not in _SWITCH:
            raise UsageError(f"invalid {label} {text}", why="must be true or false")
        return _SWITCH[text]
    if not re.fullmatch("-?[0-9]+", text) or int(text) > _HIGHEST:
        raise UsageError(f"invalid {label} {text}", why="must be a whole number")
    require_within(label, int(text), found.bounds)
    return int(text)


def as_typed(value: Any) -> str:
    """Return a value as `llmrun config set` takes it; "" for none."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return value[0] if len(value) == 1 else json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)


def _texts(text: str, label: str) -> list[str]:
    """Return a list of texts from TOML's array, or of the only text."""
    try:
        found = texts_of(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise UsageError(f"invalid {label} {text}", why="must be a text or a list of texts", hint='\'["a", "b"]\'')
    return found


def read_preset(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a preset of [presets.NAME], by their keys without the table.

    Args:
        values: of the settings file.

    Raises:
        UsageError: there is no such preset, or two of its values can't be used together.
    """
    head = f"{PRESETS}{name}."
    found = {key.removeprefix(head): value for key, value in values.items() if split_key(key)[0] == head[:-1]}
    if not found:
        hint = did_you_mean(name, preset_names(values), f"llmrun config set presets.{name}.system TEXT makes one")
        raise UsageError(f"there is no preset {name!r}", why=f"not in {config_file()}", hint=hint)
    each = {key: spelled({NAMED[key].parameter: value}) for key, value in found.items()}
    keys = {flag: key for key, flags in each.items() for flag in flags}
    given = {flag: value for flags in each.values() for flag, value in flags.items()}
    if (row := conflict(given)) is not None:
        first, other = (keys[option.partition(" ")[0]] for option in row.options)
        what = f"{first} = {as_typed(found[first])} and {other} of the preset {name} can't be used together"
        raise UsageError(what, hint=f"llmrun config unset presets.{name}.{other}")
    return found


def preset_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the presets in the settings file's values."""
    tables = (split_key(key)[0] for key in values if key.startswith(PRESETS))
    return list(dict.fromkeys(table.removeprefix(PRESETS) for table in tables))


def read_file(path: Path | None = None) -> dict[str, Any]:
    """Return the settings file's values by key; none without a file.

    Raises:
        UsageError: it is not TOML, or has an unknown key or an invalid value.
        ResourceError: it can't be read.
    """
    path = path or config_file()
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        raise ResourceError(f"the settings file {str(path)!r} can't be read", why=why) from None
    return read_text(text, path)


def read_text(text: str, path: Path) -> dict[str, Any]:
    """Return the values of a settings file's text. Raises UsageError as read_file()."""
    try:
        data = read_toml(text)
    except ValueError as error:
        why = f"{path}: {error}"
        raise UsageError("the settings file is not TOML", why=why, hint="llmrun config edit") from None
    values = dict(_flat(data, ""))
    for key, value in values.items():
        is_switch = isinstance(value, bool)
        found = find_key(key, f"in {path}")
        kind = found.kind
        if found.is_list and isinstance(value, list):
            if not all(isinstance(each, str) for each in value):
                raise UsageError(f"invalid {key}", why=f"in {path}: must be texts", hint="llmrun config edit")
            continue
        if not isinstance(value, str | int | float) or (is_switch and kind is not bool):
            raise UsageError(f"invalid {key}", why=f"in {path}: must be text or a number", hint="llmrun config edit")
        values[key] = parse(key, str(value).lower() if is_switch else str(value), f"{key} in {path}:")
    aliases = [str(value) for key, value in values.items() if split_key(key)[1] == "alias"]
    if twice := next((name for name in aliases if aliases.count(name) > 1), ""):
        raise UsageError(f"two models have the alias {twice}", why=f"in {path}", hint="llmrun config edit")
    return values


def _flat(data: Mapping[str, Any], table: str) -> Any:
    """Yield (key, value). Names of models may have dots; tables lie at most two deep."""
    depth = 0 if not table else 1 + (table.startswith(("models.", PRESETS)))
    for name, value in data.items():
        key = f"{table}.{name}" if table else name
        if isinstance(value, dict) and depth < 2:
            yield from _flat(value, key)
        else:
            yield key, value


def with_value(text: str, key: str, value: Any) -> str:
    """Return a settings file's text with another value of a key; None removes it. All else stays as it is."""
    import tomlkit

    document = tomlkit.parse(text)
    table, name = split_key(key)
    place: Any = document
    for part in table.split(".", 1) if table else ():
        if part not in place:
            if value is None:
                return text
            place[part] = tomlkit.table(is_super_table=part in ("models", "presets") and part != table)
        place = place[part]
    if value is not None:
        place[name] = value
    elif name in place:
        del place[name]
    return tomlkit.dumps(document)


def change(key: str, value: Any) -> Path:
    """Set or remove a value in the settings file; return its path.

    Raises:
        UsageError: the file is not TOML, or has an unknown key or an invalid value.
        ResourceError: it can't be written.
    """
    path = config_file()
    before = read_file(path)
    text = with_value(path.read_text(encoding="utf-8") if before or path.exists() else "", key, value)
    expected = {**before, key: value} if value is not None else {k: v for k, v in before.items() if k != key}
    assert read_text(text, path) == expected, "nothing else is changed"
    write_whole(path, text, makes_folder=True)
    return path
